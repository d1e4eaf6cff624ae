// Thin wrappers for the instructions that the kernel uses.
#pragma once
#include "config.cuh"

DEV u32 smem(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV u32 to_bf16(float x) { u16 r; asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(r) : "f"(x)); return r; }
DEV float from_bf16(u32 h) { return __uint_as_float(h << 16); }
DEV float low(u32 v) { return __uint_as_float(v << 16); }
DEV float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
DEV u32 pack(float a, float b) { u32 r; asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(b), "f"(a)); return r; }
DEV float round_bf16(float x) { return from_bf16(to_bf16(x)); }
DEV float shuffle_xor(float v, int m) { return __shfl_xor_sync(~0u, v, m); }
DEV float warp_sum(float v) { UNROLL for (int m = 16; m; m >>= 1) v += shuffle_xor(v, m); return v; }
DEV float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
DEV void block_sync() { asm volatile("bar.sync 1,%0;" ::"n"(THREADS) : "memory"); }
// Polling without a pause takes shared memory bandwidth from the computing warps (H200, 0.6B: 14 us of a frame).
DEV void nap() { asm volatile("nanosleep.u32 100;"); }
DEV u64 nanoseconds() { u64 t; asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t)); return t; }
// For the host's pinned memory: release order makes a frame's codes visible before the count that announces them.
DEV void put32_host(int* p, int v) { asm volatile("st.release.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory"); }
DEV int get32_host(const int* p) {
  int v; asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEV void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEV u64 cycles() { u64 t; asm volatile("mov.u64 %0,%clock64;" : "=l"(t)); return t; }
DEV u32 cycles_low() { u32 t; asm volatile("mov.u32 %0,%clock;" : "=r"(t)); return t; }

// Blocks exchange values through L2: relaxed, device scope.
DEV void put32(u32* p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory"); }
DEV void put64(u64* p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory"); }
DEV u32 get32(const u32* p) {
  u32 v; asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEV u64 get64(const u64* p) {
  u64 v; asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v;
}
DEV void add64(u64* p, u64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory"); }
DEV void get64x2(const u64* p, u64& a, u64& b) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1},[%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}
DEV void get32x4(const u32* p, u32 (&v)[4]) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];"
    : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}
// volatile keeps a load where it is written: before the wait that hides its latency
DEV u64 fetch64(const void* p) {
  u64 v; asm volatile("ld.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v;
}
DEV void fetch8(const void* p, u32& a, u32& b) {
  asm volatile("ld.global.nc.v2.u32 {%0,%1},[%2];" : "=r"(a), "=r"(b) : "l"(p));
}
// for weights, which are read once
DEV void fetch16(const void* p, u32 (&v)[4]) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
    : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p));
}

DEV void lds128(u32 p, u32 (&v)[4]) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
    : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(p) : "memory");
}
DEV void lds64(u32 p, u32& a, u32& b) {
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(a), "=r"(b) : "r"(p) : "memory");
}
DEV void sts64(u32 p, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(p), "r"(a), "r"(b) : "memory");
}
DEV void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// For consecutive ordinary kernels (programmatic dependent launch): lets the next one's blocks start, and waits until
// the results of the previous one are visible. No effect if the launch does not request it or the card lacks it.
#if __CUDA_ARCH__ >= 900
DEV void let_next_come() { asm volatile("griddepcontrol.launch_dependents;"); }
DEV void wait_for_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
DEV void let_next_come() {}
DEV void wait_for_last() {}
#endif

DEV void barrier_init(u64* b, u32 n) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(smem(b)), "r"(n) : "memory");
}
DEV void barrier_arrive(u64* b) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t,[%0];}" ::"r"(smem(b)) : "memory");
}
#if __CUDA_ARCH__ >= 900
constexpr u32 FILL_ARRIVALS = 1;
DEV bool barrier_test(u64* b, u32 parity) {
  u32 ok;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
    : "=r"(ok) : "r"(smem(b)), "r"(parity) : "memory");
  return ok;
}
DEV void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
DEV u64 stream_policy() { u64 p; asm("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(p)); return p; }
DEV void copy_stage(void* dst, const u8* src, u32 bytes, u64* full, u64 policy, u32 lane) {
  if (lane == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(smem(full)), "r"(bytes) : "memory");
    asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;"
      ::"r"(smem(dst)), "l"(src), "r"(bytes), "r"(smem(full)), "l"(policy) : "memory");
  }
}
#else
constexpr u32 FILL_ARRIVALS = 32;
DEV bool barrier_test(u64* b, u32 parity) {
  u32 ok;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
    : "=r"(ok) : "r"(smem(b)), "r"(parity) : "memory");
  return ok;
}
DEV void barrier_init_fence() {}
DEV void proxy_fence() {}
DEV u64 stream_policy() { return 0; }
DEV void copy_stage(void* dst, const u8* src, u32 bytes, u64* full, u64, u32 lane) {
  for (u32 o = lane * 16; o < bytes; o += 512)
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(smem(dst) + o), "l"(src + o) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem(full)) : "memory");
}
#endif
