"""Values and decisions. Nothing here touches a device."""
