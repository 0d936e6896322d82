// The fill: every slot's head from its source and its tail from its pad, in one launch.
//
// All that a step needs travels in one __grid_constant__ struct, host sources included (payload), so a
// parameter update of the graph node is the whole upload. SLOTS and PAYLOAD_BYTES are set when compiling.
//
// An element's bits are moved as they are unless load type and store type differ. Rows stand between
// `outer` blocks before them and `inner` elements behind them: a block of the target is `span` elements,
// the first `head` of which come from the source.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum Type { U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64 };
enum Kind { MEMORY, INLINE, CONSTANT };
enum Rule { PAD, REPEAT_LAST };

struct Shape {  // changes with the real extents and the kind of source
    u64 pad;
    u32 head;
    u32 source_pitch;
    u8 kind, load, rule, unused;
    u32 unused2;
};

struct Fixed {  // set when the graph is built
    u64 target;
    u32 span, inner, outer, target_pitch;
    u32 store;
    u32 blocks;
};

struct Params {
    u64 source[SLOTS];  // an address; an offset into the payload (INLINE); the bits (CONSTANT)
    Shape shape[SLOTS];
    Fixed fixed[SLOTS];
    alignas(16) u8 payload[PAYLOAD_BYTES];
};

__device__ __forceinline__ u32 size_of(u32 type) {
    return type <= I8 ? 1 : type <= I16 || type == F16 || type == BF16 ? 2 : type <= I32 || type == F32 ? 4 : 8;
}

__device__ __forceinline__ u64 load_bits(const u8* at, u32 size) {
    switch (size) {
        case 1: return *at;
        case 2: return *(const u16*)at;
        case 4: return *(const u32*)at;
        default: return *(const u64*)at;
    }
}

__device__ __forceinline__ void store_bits(u8* at, u32 size, u64 bits) {
    switch (size) {
        case 1: *at = (u8)bits; break;
        case 2: *(u16*)at = (u16)bits; break;
        case 4: *(u32*)at = (u32)bits; break;
        default: *(u64*)at = bits;
    }
}

__device__ u64 integer_bits(u64 bits, u32 type) {  // sign-extend; the store cuts to its own size
    switch (type) {
        case I8: return (u64)(long long)(signed char)bits;
        case I16: return (u64)(long long)(short)bits;
        case I32: return (u64)(long long)(int)bits;
        default: return bits;
    }
}

__device__ u64 float_bits(u64 bits, u32 load, u32 store) {
    if (load == F64 && store != F64) {  // by way of float, as torch casts
        bits = __float_as_uint((float)__longlong_as_double((long long)bits));
        load = F32;
    }
    float value;
    if (load == F16) asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    else value = __uint_as_float(load == BF16 ? (u32)bits << 16 : (u32)bits);
    u16 half;
    switch (store) {
        case F16: asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value)); return half;
        case BF16: asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value)); return half;
        case F32: return __float_as_uint(value);
        default: return (u64)__double_as_longlong((double)value);
    }
}

__device__ __forceinline__ u64 read(const u8* source, u64 index, u32 load, u32 store) {
    const u32 size = size_of(load);
    const u64 bits = load_bits(source + index * size, size);
    if (load == store) return bits;
    return load >= F16 ? float_bits(bits, load, store) : integer_bits(bits, load);
}

// Elements [begin, end) of a slot, counted over all its outer blocks, one thread each.
__device__ void fill_elements(const Shape s, const Fixed f, const u8* source, u64 constant, u32 begin, u32 end,
                              u32 thread, u32 threads) {
    const u32 size = size_of(f.store);
    for (u32 e = begin + thread; e < end; e += threads) {
        const u32 block = e / f.span, within = e - block * f.span;
        u64 bits = s.pad;
        if (within < s.head || (s.rule == REPEAT_LAST && s.head)) {
            const u32 at = within < s.head ? within : s.head - f.inner + within % f.inner;
            bits = s.kind == CONSTANT ? constant : read(source, (u64)block * s.source_pitch + at, s.load, f.store);
        } else if (s.rule == REPEAT_LAST) {
            bits = 0;
        }
        store_bits((u8*)f.target + ((u64)block * f.target_pitch + within) * size, size, bits);
    }
}

__device__ __forceinline__ bool aligned(const void* at) { return ((u64)at & 15) == 0; }

// Copy and pad in 16-byte words where everything lines up; the few elements between them one by one.
__device__ void fill_words(const Shape s, const Fixed f, const u8* source, u32 thread, u32 threads) {
    const u32 size = size_of(f.store), per_word = 16 / size;
    const u32 words = s.head / per_word;
    const uint4* from = (const uint4*)source;
    uint4* to = (uint4*)f.target;
    u32 w = thread;
    for (; w + 3 * threads < words; w += 4 * threads) {  // four loads in flight
        const uint4 a = from[w], b = from[w + threads], c = from[w + 2 * threads], d = from[w + 3 * threads];
        to[w] = a, to[w + threads] = b, to[w + 2 * threads] = c, to[w + 3 * threads] = d;
    }
    for (; w < words; w += threads) to[w] = from[w];
    const u32 tail = (s.head + per_word - 1) / per_word, all = f.span / per_word;
    u64 pattern = s.pad;
    for (u32 bits = size * 8; bits < 64; bits *= 2) pattern = (pattern & ((1ull << bits) - 1)) | pattern << bits;
    const uint4 pad = make_uint4((u32)pattern, (u32)(pattern >> 32), (u32)pattern, (u32)(pattern >> 32));
    for (w = tail + thread; w < all; w += threads) to[w] = pad;
    fill_elements(s, f, source, 0, words * per_word, min(tail * per_word, f.span), thread, threads);
    fill_elements(s, f, source, 0, max(tail, all) * per_word, f.span, thread, threads);
}

extern "C" __global__ void graphglue_fill(const __grid_constant__ Params p) {
    // One row of blocks for each slot, so that nothing is looked for: every read of the struct that is
    // waited for costs about a microsecond, because it is new at every step.
    const u32 slot = blockIdx.y;
    const Shape s = p.shape[slot];
    const Fixed f = p.fixed[slot];
    if (blockIdx.x >= f.blocks) return;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 threads = f.blocks * blockDim.x;
    const u64 where = p.source[slot];
    const u8* source = s.kind == INLINE ? p.payload + where : (const u8*)where;
    const bool wide = f.outer == 1 && s.kind != CONSTANT && s.load == f.store && s.rule == PAD && aligned(source) &&
                      aligned((const void*)f.target);
    if (wide) fill_words(s, f, source, thread, threads);
    else fill_elements(s, f, source, where, 0, f.outer * f.span, thread, threads);
}
