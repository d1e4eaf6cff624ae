// One Qwen3-TTS frame in one launch: talker step, code 0, sixteen predictor positions, codes 1-15, embedding sum.
// A launch makes `frames` frames in a row and stops at end of speech.
#include "sampling.cuh"

template <class H> DEV void head_logits(Ctx& c, u32 tag, int rows) {
  Fragments<H> w; preload(c, w);
  const float v = gemv<H>(c, w);
  const u32 id = (c.block * WARPS + c.warp) * H::WARP_ROWS + row_of<H>(c);
  if (holds_row<H>(c) && (int)id < rows) publish(&c.p->exchange->logits[id], tag, v);
}

// The talker's hidden state, still in vec, as the predictor takes it.
DEV void project(Ctx& c, Row<Predictor>& x) {
  typedef Projection M;
  const u32 tag = ++c.tag;
  Fragments<M> w; preload(c, w);
  const float v = gemv<M>(c, w);
  const u32 row = c.warp * M::WARP_ROWS + row_of<M>(c), id = c.block * (P_H / CTAS) + row;
  if (holds_row<M>(c) && row < P_H / CTAS) publish(&c.p->exchange->projected[id], tag, v + from_bf16(c.p->projection_bias[id]));
  UNROLL for (int g = 0; g < Predictor::GRANULES; g++) if (owns<Predictor>(c, g)) {
    u32 a, b; poll4(c, &c.p->exchange->projected[element<Predictor>(c, g)], tag, a, b);
    x.v[g][0] = low(a); x.v[g][1] = high(a); x.v[g][2] = low(b); x.v[g][3] = high(b);
  }
  block_sync();                                               // all warps have read vec before it is written again
}

DEV void consumer(Ctx& c) {
  const Params& p = *c.p; Shared& s = *c.s;
  Row<Talker> hidden, sum; Norm<Talker> norm; Norm<Predictor> pnorm;
  load_row<Talker>(c, p.hidden, hidden); load_row<Talker>(c, p.sum, sum);
  int made = 0, ended = 0;
  for (int i = 0; i < p.frames && !s.dead; i++) {
    const int frame = p.frame + i;
    if (p.prefill || frame > 0) {                             // the talker takes a prompt row, or the previous frame and text
      if (p.prefill) load_row<Talker>(c, p.text + (u64)i * T_H, hidden);
      else { hidden = sum; add_row<Talker>(c, p.text + (u64)i * T_H, hidden); }
      round_row<Talker>(hidden);
      load_norm<Talker>(c, p.talker_norms, norm);
      layers<Talker, true>(c, p.position + i, hidden, norm, p.talker_norms, p.talker_final);
      final_norm<Talker>(c, hidden, norm);
    } else { to_vec<Talker>(c, hidden); block_sync(); }
    if (p.prefill) { if (!s.dead) made++; continue; }
    u32 tag = ++c.tag;
    head_logits<TalkerHead>(c, tag, VT);
    load_norm<Predictor>(c, p.predictor_norms, pnorm);
    int code = sample<VT>(c, tag, 0, frame);
    if (code == p.eos) { ended = 1; s.stop = 1; break; }
    if (c.tid == 0) s.seen[code >> 5] |= 1u << (code & 31);
    if (c.block == 0 && c.tid == 0) p.codes[i * CODES] = code;
    load_row<Talker>(c, p.embeddings0 + (u64)code * T_H, sum);
    Row<Predictor> x;
    if constexpr (PROJECTED) project(c, x);
    else UNROLL for (int g = 0; g < Predictor::GRANULES; g++) UNROLL for (int k = 0; k < 4; k++) x.v[g][k] = hidden.v[g][k];
    for (int pos = 0; pos < CODES; pos++) {
      if (pos == 1) load_row<Predictor>(c, p.inputs0 + (u64)code * P_H, x);
      layers<Predictor, false>(c, pos, x, pnorm, p.predictor_norms, pos ? p.predictor_final : p.predictor_norms);
      if (pos == 0) continue;
      MARK(c, 14);
      final_norm<Predictor>(c, x, pnorm);
      tag = ++c.tag;
      head_logits<PredictorHead>(c, tag, VP);
      load_norm<Predictor>(c, p.predictor_norms, pnorm);
      MARK(c, 15);
      code = sample<VP>(c, tag, pos, frame);
      MARK(c, 16);
      if (c.block == 0 && c.tid == 0) p.codes[i * CODES + pos] = code;
      add_row<Talker>(c, p.embeddings + ((u64)(pos - 1) * VP + code) * T_H, sum);
      if (pos + 1 < CODES) load_row<Predictor>(c, p.inputs + ((u64)(pos - 1) * VP + code) * P_H, x);
    }
    round_row<Talker>(sum);
    if (!s.dead) made++;
  }
  if (c.block == 0) {
    store_row<Talker>(c, p.hidden, hidden); store_row<Talker>(c, p.sum, sum);
    block_sync();
    for (u32 i = c.tid; i < VT / 32; i += THREADS) p.seen[i] = s.seen[i];
    if (c.tid == 0) { p.status[0] = made; p.status[1] = ended; p.status[7] = (int)c.tag; }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + FEED_THREADS, 1) mktts_frames(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 dynamic[];
  Shared* s = (Shared*)dynamic;
  Ctx c; c.block = blockIdx.x; c.tid = threadIdx.x; c.lane = c.tid & 31; c.warp = c.tid >> 5;
  c.group = c.block / GROUP; c.rank = c.block % GROUP; c.stage = 0; c.phase = 0; c.tag = p.tag; c.s = s; c.p = &p;
  if (c.tid == 0) {
    for (int i = 0; i < RING; i++) { barrier_init(&s->full[i], FILL_ARRIVALS); barrier_init(&s->empty[i], WARPS); }
    s->stop = 0; s->dead = 0; s->traced = 0; barrier_init_fence();
  }
  for (u32 i = c.tid; i < VT / 32; i += blockDim.x) s->seen[i] = p.seen[i];
  for (u32 i = c.tid; i < sizeof(s->key) / 4; i += blockDim.x) ((u32*)s->key)[i] = 0;
  for (u32 i = c.tid; i < sizeof(s->value) / 4; i += blockDim.x) ((u32*)s->value)[i] = 0;
  for (u32 i = c.tid; i < sizeof(s->vec) / 4; i += blockDim.x) ((u32*)s->vec)[i] = 0;
  __syncthreads();
  if (c.warp >= WARPS) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
    if (c.warp == WARPS) feeder(c);
  } else {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
    consumer(c);
  }
}
extern "C" __device__ const u32 mktts_shared_bytes = sizeof(Shared);
extern "C" __device__ const u32 mktts_exchange_bytes = sizeof(Exchange);
extern "C" __device__ const u32 mktts_params_bytes = sizeof(Params);
