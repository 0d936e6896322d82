"""The only place that touches a device: slot storage, the fill, streams."""
