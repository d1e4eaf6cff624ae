// In the place of csrc/ptx.cuh: a GPU's lanes on one CPU thread, so that csrc/frame.cu runs without a GPU.
//
// Every lane is a context of its own, begun by ucontext and changed by setjmp, which makes no system call. It gives way
// where the kernel polls and where a warp or a block meets; launch.h takes the warps in an order of chance. Code before
// sm_90 is what runs: __CUDA_ARCH__ is 800. An access behind a block's shared memory or out of the exchange area, or
// one that is not aligned to its width, ends the process.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __grid_constant__
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 800
#include "config.cuh"

#define HOST static inline
[[noreturn]] HOST void fail(const char* what) { fprintf(stderr, "%s\n", what); abort(); }

// ---- lanes, warps and blocks

struct Warp {
  u32 arrived = 0, meetings = 0, given[32], taken[2][32];                   // of values that lanes show each other
  u32 products_arrived = 0, products = 0, a[32][4], b[32][2];
  float d[2][32][4];
};
struct Meeting { u32 arrived = 0, times = 0; };
// As many bytes as a block has, then a page that nobody may touch: also what the kernel reads by plain C++ is caught.
struct SharedMemory {
  u8* end = nullptr; size_t bytes = 0;
  void resize(size_t n);                                                    // launch.h
  void free();
  u8* data() const { return end - bytes; }
  size_t size() const { return bytes; }
};
struct Block {
  u32 id, row = 0, rows = 1;
  SharedMemory shared;
  Warp warps[(THREADS + FEED_THREADS) / 32];
  Meeting consumers, all;
};
struct Lane {
  ucontext_t context; jmp_buf at;
  u32 thread; Block* block; bool begun = false, done = false;
  const u32* meeting = nullptr; u32 time = 0;                               // nothing to do while these are equal
};
static Lane* now;
static jmp_buf scheduler;
static u64 turns = 1;                                                       // of warps so far: the clock here
HOST void give_way() { if (!_setjmp(now->at)) _longjmp(scheduler, 1); }
// Until it gives way.
HOST void take_turn(Lane& lane) {
  if (lane.done || (lane.meeting && *lane.meeting == lane.time)) return;
  now = &lane; lane.meeting = nullptr;
  if (_setjmp(scheduler)) return;
  if (lane.begun) _longjmp(lane.at, 1);
  lane.begun = true; setcontext(&lane.context);
}
HOST void wait_while(const u32& times, u32 time) {
  now->meeting = &times; now->time = time;
  while (times == time) give_way();
}

struct Index { u32 x, y = 0; };
#define threadIdx Index{now->thread}
#define blockIdx Index{now->block->id, now->block->row}
#define blockDim Index{THREADS + FEED_THREADS}
#define gridDim Index{0, now->block->rows}
HOST Warp& own_warp() { return now->block->warps[now->thread / 32]; }
HOST u32 own_lane() { return now->thread % 32; }
HOST void meet(Meeting& m, u32 expected) {
  const u32 time = m.times;
  if (++m.arrived == expected) { m.arrived = 0; m.times++; }
  wait_while(m.times, time);
}
HOST void block_sync() { meet(now->block->consumers, THREADS); }
HOST void __syncthreads() { meet(now->block->all, THREADS + FEED_THREADS); }

// What all lanes of the warp give here. The values stay until the next meeting but one.
HOST const u32 (&shown(u32 value))[32] {
  Warp& w = own_warp(); const u32 time = w.meetings;
  w.given[own_lane()] = value;
  if (++w.arrived == 32) { w.arrived = 0; memcpy(w.taken[time & 1], w.given, sizeof w.given); w.meetings++; }
  wait_while(w.meetings, time);
  return w.taken[time & 1];
}

// ---- CUDA's functions

HOST u32 __float_as_uint(float f) { u32 u; memcpy(&u, &f, 4); return u; }
HOST float __uint_as_float(u32 u) { float f; memcpy(&f, &u, 4); return f; }
HOST u32 __shfl_sync(u32, u32 v, int from) { return shown(v)[from & 31]; }
HOST float __shfl_sync(u32, float v, int from) { return __uint_as_float(shown(__float_as_uint(v))[from & 31]); }
HOST u32 __shfl_xor_sync(u32, u32 v, int m) { return shown(v)[own_lane() ^ m]; }
HOST int __shfl_xor_sync(u32, int v, int m) { return (int)shown((u32)v)[own_lane() ^ m]; }
HOST float __shfl_xor_sync(u32, float v, int m) { return __uint_as_float(shown(__float_as_uint(v))[own_lane() ^ m]); }
HOST void __syncwarp() { shown(0); }
HOST u32 __activemask() { return 1u << own_lane(); }   // only polls ask: each lane for itself is as good
HOST bool __all_sync(u32 mask, bool p) {
  if (mask != ~0u) return p;
  bool all = true; for (u32 v : shown(p)) all &= v != 0;
  return all;
}
HOST u32 __reduce_max_sync(u32, u32 v) { u32 r = 0; for (u32 x : shown(v)) r = x > r ? x : r; return r; }
HOST int __reduce_min_sync(u32, int v) {
  int r = 0x7fffffff; for (u32 x : shown(v)) r = (int)x < r ? (int)x : r;
  return r;
}
HOST u32 __reduce_add_sync(u32, u32 v) { u32 r = 0; for (u32 x : shown(v)) r += x; return r; }
HOST u32 __byte_perm(u32 a, u32 b, u32 which) {
  const u64 all = (u64)b << 32 | a; u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(all >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
HOST uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
HOST uint4 __ldcs(const uint4* p) { return *p; }
HOST float exp_of(float x) { return expf(x); }
#define __expf exp_of
HOST float __fdividef(float a, float b) { return a / b; }
HOST float __fdiv_rn(float a, float b) { return a / b; }
HOST float __frcp_rn(float a) { return 1.f / a; }
HOST float rsqrtf(float a) { return 1.f / sqrtf(a); }
HOST float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
HOST float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
HOST i64 __float2ll_rn(float f) { return llrintf(f); }
HOST float __ll2float_rn(i64 v) { return (float)v; }
HOST u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }

// ---- csrc/ptx.cuh by its own names

HOST u32 smem(const void* p) {
  const long at = (const u8*)p - now->block->shared.data();
  if (at < 0 || at >= (long)now->block->shared.size()) fail("an address outside of the block's shared memory");
  return (u32)at;
}
HOST u8* shared_at(u32 at, u32 width) {
  if (at + width > now->block->shared.size() || at % width) fail("shared memory: out of range, or not aligned");
  return now->block->shared.data() + at;
}
HOST u32 to_bf16(float x) { const u32 b = __float_as_uint(x); return (b + 0x7fff + (b >> 16 & 1)) >> 16; }
HOST float from_bf16(u32 h) { return __uint_as_float(h << 16); }
HOST float low(u32 v) { return __uint_as_float(v << 16); }
HOST float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
HOST u32 pack(float a, float b) { return to_bf16(a) | to_bf16(b) << 16; }
HOST float round_bf16(float x) { return from_bf16(to_bf16(x)); }
template <class T> HOST T shuffle_xor(T v, int m) { return __shfl_xor_sync(~0u, v, m); }
HOST float warp_sum(float v) { for (int m = 16; m; m >>= 1) v += shuffle_xor(v, m); return v; }
HOST float exp2_fast(float x) { return exp2f(x); }
HOST void nap() {}
HOST u64 nanoseconds() { return turns; }
HOST u64 cycles() { return 0; }
HOST u32 cycles_low() { return 0; }
HOST void prefetch(const void*) {}
HOST void let_next_come() {}
HOST void wait_for_last() {}
HOST void put32_host(int* p, int v) { *(volatile int*)p = v; }
HOST int get32_host(const int* p) { return *(volatile const int*)p; }

void check_exchange(const void* p, u32 width);   // launch.h
HOST void put32(u32* p, u32 v) { check_exchange(p, 4); *(volatile u32*)p = v; }
HOST void put64(u64* p, u64 v) { check_exchange(p, 8); *(volatile u64*)p = v; }
HOST void add64(u64* p, u64 v) { check_exchange(p, 8); *(volatile u64*)p += v; }
HOST u32 get32(const u32* p) { give_way(); check_exchange(p, 4); return *(volatile const u32*)p; }
HOST u64 get64(const u64* p) { give_way(); check_exchange(p, 8); return *(volatile const u64*)p; }
HOST void get64x2(const u64* p, u64& a, u64& b) { give_way(); check_exchange(p, 16); a = p[0]; b = p[1]; }
HOST void get32x4(const u32* p, u32 (&v)[4]) { give_way(); check_exchange(p, 16); memcpy(v, p, 16); }
HOST u64 fetch64(const void* p) { u64 v; memcpy(&v, p, 8); return v; }
HOST void fetch8(const void* p, u32& a, u32& b) {
  if ((u64)p % 8) fail("a load that is not aligned");
  memcpy(&a, p, 4); memcpy(&b, (const u8*)p + 4, 4);
}
HOST void fetch16(const void* p, u32 (&v)[4]) {
  if ((u64)p % 16) fail("a load that is not aligned");
  memcpy(v, p, 16);
}
HOST void lds128(u32 p, u32 (&v)[4]) { memcpy(v, shared_at(p, 16), 16); }
HOST void lds64(u32 p, u32& a, u32& b) { const u8* v = shared_at(p, 8); memcpy(&a, v, 4); memcpy(&b, v + 4, 4); }
HOST void sts64(u32 p, u32 a, u32 b) { u8* v = shared_at(p, 8); memcpy(v, &a, 4); memcpy(v + 4, &b, 4); }

// PTX ISA, mma.m16n8k16: lane 4 g + q holds A's rows g and g + 8, B's column g, D's rows g and g + 8.
HOST void multiply_tiles(Warp& w, float (&d)[32][4]) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; lane++) for (int i = 0; i < 2; i++) {
    const int g = lane / 4, k = lane % 4 * 2 + i;
    for (int r = 0; r < 4; r++) a[g + r % 2 * 8][k + r / 2 * 8] = i ? high(w.a[lane][r]) : low(w.a[lane][r]);
    for (int r = 0; r < 2; r++) b[k + r * 8][g] = i ? high(w.b[lane][r]) : low(w.b[lane][r]);
  }
  for (int lane = 0; lane < 32; lane++) for (int i = 0; i < 4; i++) {
    float sum = 0.f;
    for (int k = 0; k < 16; k++) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
    d[lane][i] = sum;
  }
}
HOST void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Warp& w = own_warp(); const u32 lane = own_lane(), time = w.products;
  memcpy(w.a[lane], a, 16); w.b[lane][0] = b0; w.b[lane][1] = b1;
  if (++w.products_arrived == 32) { w.products_arrived = 0; multiply_tiles(w, w.d[time & 1]); w.products++; }
  wait_while(w.products, time);
  for (int i = 0; i < 4; i++) d[i] += w.d[time & 1][lane][i];
}

struct Barrier { u16 expected, pending; u32 phase; };
static_assert(sizeof(Barrier) == 8, "in the place of an mbarrier");
HOST void barrier_init(u64* b, u32 n) { *(Barrier*)b = {(u16)n, (u16)n, 0}; }
HOST void barrier_arrive(u64* b) {
  Barrier& x = *(Barrier*)b;
  if (--x.pending == 0) { x.pending = x.expected; x.phase++; }
}
HOST bool barrier_test(u64* b, u32 parity) { give_way(); return (((Barrier*)b)->phase & 1) != (parity & 1); }
constexpr u32 FILL_ARRIVALS = 32;
HOST void barrier_init_fence() {}
HOST void proxy_fence() {}
HOST u64 stream_policy() { return 0; }
static u64 lost_copy = 0;   // the how many-th copy of a stage by a lane never ends; 0: none
HOST void copy_stage(void* to, const u8* from, u32 bytes, u64* full, u64, u32 lane) {
  if ((u64)from % 16 || bytes % 16) fail("a copy that is not aligned");
  for (u32 at = lane * 16; at < bytes; at += 512) memcpy(shared_at(smem(to) + at, 16), from + at, 16);
  if (lost_copy == 0 || --lost_copy) barrier_arrive(full);
}
