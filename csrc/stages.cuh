// Code above the layers shared by the kernels: a talker step, the host's request to stop, the body of a block.
#pragma once
#include "sampling.cuh"

// One talker step on `x`; the normed result is also left in vec.
DEV void talk(Ctx& c, int position, Row<Talker>& x, u16* hidden) {
  const Params& p = *c.p; Norm<Talker> norm;
  load_norm<Talker>(c, p.talker_norms, norm);
  round_row<Talker>(x);
  Row<Talker> rows[1] = {x};
  layers<Talker, true, 1>(c, position, rows, norm, p.talker_norms, p.talker_final, hidden);
  x = rows[0];
  MARK(c, 14);
  final_norm<Talker>(c, x, norm);
}
// Whether the host wants more frames: block 0 asks early in a frame, and all blocks read the answer at its end.
DEV void ask_host(Ctx& c, u32 tag) {
  if (c.block == 0 && c.tid == 0) put32(&c.p->exchange->go, (tag << 16) | (get32_host(c.u->out + STOP) ? 1u : 0u));
}
DEV bool wanted(Ctx& c, u32 tag) {
  Watch w = {0, 0}; u32 v;
  while ((((v = get32(&c.p->exchange->go)) >> 16) != (tag & 0xffffu)) && !give_up(c, w, ANSWER)) {}
  return (v & 1u) == 0;
}


// One warp feeds the ring, eight consume it.
template <void FEED(Ctx&), void CONSUME(Ctx&)> DEV void run(const Params& p) {
  extern __shared__ __align__(128) u8 dynamic[];
  Shared* s = (Shared*)dynamic;
  Ctx c; c.block = blockIdx.x; c.tid = threadIdx.x; c.lane = c.tid & 31; c.warp = c.tid >> 5;
  c.group = c.block / GROUP; c.rank = c.block % GROUP; c.stage = 0; c.phase = 0; c.tag = p.tag;
  c.counts = p.exchange->counts[0];
  c.s = s; c.p = &p; c.u = &p.stream;
#ifdef TRACE
  c.starved = 0;
#endif
  if (c.tid == 0) {
    for (int i = 0; i < RING; i++) {
      barrier_init(&s->full[i], FILL_ARRIVALS);
      barrier_init(&s->empty[i], READ_ARRIVALS);
    }
    s->stop = 0; s->dead = 0; s->traced = 0; s->lost = 0; barrier_init_fence();
  }
  if (c.u->seen) for (u32 i = c.tid; i < SEEN_WORDS; i += blockDim.x) s->seen[i] = c.u->seen[i];
  for (u32 i = c.tid; i < sizeof(s->key) / 4; i += blockDim.x) ((u32*)s->key)[i] = 0;
  for (u32 i = c.tid; i < sizeof(s->value) / 4; i += blockDim.x) ((u32*)s->value)[i] = 0;
  for (u32 i = c.tid; i < sizeof(s->vec0) / 4; i += blockDim.x) ((u32*)s->vec0)[i] = 0;
  for (u32 i = c.tid; i < sizeof(s->inner) / 4; i += blockDim.x) ((u32*)s->inner)[i] = 0;
  for (u32 i = c.tid; i < sizeof(s->vec1) / 4; i += blockDim.x) ((u32*)s->vec1)[i] = 0;
#ifdef STILL
  for (u32 i = c.tid; i < sizeof(s->ring) / 4; i += blockDim.x) ((u32*)s->ring)[i] = 0;
#endif
  __syncthreads();
  if (c.warp >= WARPS) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
    if (c.warp == WARPS) FEED(c);
  } else {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
    CONSUME(c);
    if (c.tid == 0) s->stop = 1;                              // tells the feeder to stop waiting
    // Every block has read the counts by now, as none can finish a layer without all others.
    if (c.block == 0 && c.tid == 0) p.exchange->counts[0] = c.counts;
  }
}

// Constants that the host reads from a compiled kernel, or compares with its own (mktts/kernel/build.py).
#define EXPORT(type, name, value) extern "C" __device__ const type mktts_##name = value
EXPORT(u32, shared_bytes, sizeof(Shared));
EXPORT(u32, exchange_bytes, sizeof(Exchange));
EXPORT(u32, params_bytes, sizeof(Params));
EXPORT(u32, stage_bytes, STAGE_BYTES);
EXPORT(u32, threads, THREADS + FEED_THREADS);
EXPORT(u32, ring, RING);
EXPORT(u32, talker_copies, TALKER_COPIES);
EXPORT(u32, predictor_copies, PREDICTOR_COPIES);
EXPORT(u32, layer_copies, LAYER_COPIES);
EXPORT(u32, head_copies, HEAD_COPIES);
EXPORT(u32, warps, WARPS);
EXPORT(u32, fragments, FRAGS);
EXPORT(u32, layer_exchanges, LAYER_EXCHANGES);
EXPORT(u32, status_words, STATUS_WORDS);
EXPORT(u32, frame_words, FRAME_WORDS);
EXPORT(float, eps, EPS);
