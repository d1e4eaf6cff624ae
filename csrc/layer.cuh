// One decoder layer as a short list of phases.
#pragma once
#include "attention.cuh"

template <class S> struct Row { float v[S::GRANULES][4]; };          // a thread's share of a vector: values 4 * (tid + 256 g) + i
template <class S> struct Norm { u32 w[S::GRANULES][2]; };
template <class S> DEV u32 element(const Ctx& c, int g) { return 4 * (c.tid + THREADS * g); }
template <class S> DEV bool owns(const Ctx& c, int g) { return S::H % (4 * THREADS) == 0 || element<S>(c, g) < S::H; }

template <class S> DEV void load_norm(const Ctx& c, const u16* w, Norm<S>& n) {
  UNROLL for (int g = 0; g < S::GRANULES; g++) {
    n.w[g][0] = n.w[g][1] = 0;                              // where this thread owns nothing: 0 * garbage could be NaN
    if (owns<S>(c, g)) fetch8(w + element<S>(c, g), n.w[g][0], n.w[g][1]);
  }
}
template <class S> DEV void load_row(const Ctx& c, const u16* from, Row<S>& x) {
  UNROLL for (int g = 0; g < S::GRANULES; g++) {
    u32 a = 0, b = 0; if (owns<S>(c, g)) fetch8(from + element<S>(c, g), a, b);
    x.v[g][0] = low(a); x.v[g][1] = high(a); x.v[g][2] = low(b); x.v[g][3] = high(b);
  }
}
template <class S> DEV void add_row(const Ctx& c, const u16* from, Row<S>& x) {
  Row<S> y; load_row<S>(c, from, y);
  UNROLL for (int g = 0; g < S::GRANULES; g++) UNROLL for (int i = 0; i < 4; i++) x.v[g][i] += y.v[g][i];
}
template <class S> DEV void store_row(const Ctx& c, u16* to, const Row<S>& x) {
  UNROLL for (int g = 0; g < S::GRANULES; g++) if (owns<S>(c, g)) {
    u32* d = (u32*)(to + element<S>(c, g)); d[0] = pack(x.v[g][0], x.v[g][1]); d[1] = pack(x.v[g][2], x.v[g][3]);
  }
}
template <class S> DEV void round_row(Row<S>& x) {
  UNROLL for (int g = 0; g < S::GRANULES; g++) UNROLL for (int i = 0; i < 4; i++) x.v[g][i] = round_bf16(x.v[g][i]);
}
template <class S> DEV void to_vec(const Ctx& c, const Row<S>& x) {
  UNROLL for (int g = 0; g < S::GRANULES; g++) if (owns<S>(c, g))
    sts64(smem(c.s->vec) + vec_offset<S::Qkv::K>(element<S>(c, g)), pack(x.v[g][0], x.v[g][1]), pack(x.v[g][2], x.v[g][3]));
}
template <class S> DEV void sum_squares(const Ctx& c, const Row<S>& x) {
  float ss = 0.f;
  UNROLL for (int g = 0; g < S::GRANULES; g++) UNROLL for (int i = 0; i < 4; i++) ss += x.v[g][i] * x.v[g][i];
  ss = warp_sum(ss);
  if (c.lane == 0) c.s->squares[c.warp] = ss;
}
template <class S> DEV float reciprocal_rms(const Ctx& c) {
  float ss = 0.f; UNROLL for (int w = 0; w < WARPS; w++) ss += c.s->squares[w];
  return rsqrtf(ss * (1.f / S::H) + EPS);
}
// The vector goes into the matrix as x * w; the product is scaled by 1 / rms afterwards, which the tensor cores hide.
template <class S> DEV void weigh(const Ctx& c, const Row<S>& x, const Norm<S>& n) {
  Row<S> y;
  UNROLL for (int g = 0; g < S::GRANULES; g++) {
    y.v[g][0] = x.v[g][0] * low(n.w[g][0]); y.v[g][1] = x.v[g][1] * high(n.w[g][0]);
    y.v[g][2] = x.v[g][2] * low(n.w[g][1]); y.v[g][3] = x.v[g][3] * high(n.w[g][1]);
  }
  to_vec<S>(c, y); sum_squares<S>(c, x);
  block_sync();
}
// RMSNorm whose result is itself an input of later stages: rounded as the model rounds.
template <class S> DEV void final_norm(const Ctx& c, Row<S>& x, const Norm<S>& n) {
  sum_squares<S>(c, x);
  block_sync();
  const float r = reciprocal_rms<S>(c);
  UNROLL for (int g = 0; g < S::GRANULES; g++) UNROLL for (int i = 0; i < 4; i++) {
    const float w = i & 1 ? high(n.w[g][i / 2]) : low(n.w[g][i / 2]);
    x.v[g][i] = round_bf16(w * round_bf16(x.v[g][i] * r));
  }
  to_vec<S>(c, x);
  block_sync();
}
template <class S> DEV void keep_residual(const Ctx& c, const Row<S>& x) { store_row<S>(c, c.s->residual, x); }
// As owner, mails this block's rows; then takes the new residual from its own mailbox.
template <class S, class M>
DEV void take_mail(Ctx& c, u32 (*boxes)[MAXH], u32 tag, Row<S>& x, Fragments<M>& next, bool more = true) {
  if (c.warp == 0) own_rows<S::H>(c, boxes, tag);           // before anything that may wait: every block waits for it
  if (more) preload(c, next);
  UNROLL for (int g = 0; g < S::GRANULES; g++) if (owns<S>(c, g)) {
    u32 a, b; poll4(c, &boxes[c.block][element<S>(c, g)], tag, a, b);
    x.v[g][0] = low(a); x.v[g][1] = high(a); x.v[g][2] = low(b); x.v[g][3] = high(b);
  }
}
template <class M> DEV u32 row_of(const Ctx& c) { return c.lane / Rows<M::TILES>::LANES; }
template <class M> DEV bool holds_row(const Ctx& c) { return c.lane % Rows<M::TILES>::LANES == 0 && row_of<M>(c) < M::WARP_ROWS; }

// `first`: this layer's query-key-value fragments, then, if there are `more` layers, the next one's.
// `norm`: the input norm's weights, then those that follow this layer (`next_norm`).
template <class S, bool TALKER>
DEV void layer(Ctx& c, int l, int position, Row<S>& x, Norm<S>& norm, Fragments<typename S::Qkv>& first,
               const u16* norms, const u16* next_norm, bool more) {
  Shared& s = *c.s; Exchange& e = *c.p->exchange;
  const u32 tag_qkv = ++c.tag, tag_att = ++c.tag, tag_h = ++c.tag, tag_act = ++c.tag, tag_x = ++c.tag;
  MARK(c, 1);
  keep_residual<S>(c, x);
  weigh<S>(c, x, norm);                                     // 1. queries, keys, values of the group
  MARK(c, 2);
  {
    typedef typename S::Qkv M;
    const float v = gemv<M>(c, first) * reciprocal_rms<S>(c);
    const u32 row = c.warp * M::WARP_ROWS + row_of<M>(c);
    if (holds_row<M>(c) && row < S::QKV_ROWS) publish(&e.qkv[c.group][c.rank * S::QKV_ROWS + row], tag_qkv, v);
  }
  MARK(c, 3);
  load_norm<S>(c, norms + S::H, norm);
  Fragments<typename S::Out> out;                           // 2. attention; its output is the next input
  if constexpr (TALKER) talker_attention(c, l, position, tag_qkv, tag_att, out);
  else { preload(c, out); predictor_attention(c, l, position, tag_qkv); }
  MARK(c, 4);
  {
    typedef typename S::Out M;                              // 3. output projection of this group, summed over groups
    const float v = gemv<M>(c, out);
    const u32 row = c.warp * M::WARP_ROWS + row_of<M>(c);
    if (holds_row<M>(c) && row < S::OUT_ROWS) send_part<S::H>(c, row, tag_h, v);
  }
  MARK(c, 5);
  Fragments<typename S::GateUp> gate_up;
  take_mail<S>(c, e.h, tag_h, x, gate_up);
  MARK(c, 6);
  keep_residual<S>(c, x);
  weigh<S>(c, x, norm);                                     // 4. gate and up
  MARK(c, 7);
  {
    typedef typename S::GateUp M;
    const float v = round_bf16(gemv<M>(c, gate_up) * reciprocal_rms<S>(c));
    const float up = shuffle_xor(v, Rows<M::TILES>::LANES);
    const u32 dim = c.warp * M::TILES + row_of<M>(c) / 2;
    if (holds_row<M>(c) && !(row_of<M>(c) & 1) && dim < S::ACT_DIMS)
      publish(&e.act[c.group * (S::F / NKV) + c.rank * S::ACT_DIMS + dim], tag_act,
              round_bf16(__fdividef(v, 1.f + __expf(-v))) * up);
  }
  MARK(c, 8);
  load_norm<S>(c, next_norm, norm);
  Fragments<typename S::Down> down; preload(c, down);
  for (u32 i = c.tid * 4; i < S::F / NKV; i += THREADS * 4) {
    u32 a, b; poll4(c, &e.act[c.group * (S::F / NKV) + i], tag_act, a, b);
    sts64(smem(s.vec) + vec_offset<S::Down::K>(i), a, b);
  }
  block_sync();
  MARK(c, 9);
  {
    typedef typename S::Down M;                             // 5. down projection of this group, summed over groups
    const float v = gemv<M>(c, down);
    const u32 row = c.warp * M::WARP_ROWS + row_of<M>(c);
    if (holds_row<M>(c) && row < S::OUT_ROWS) send_part<S::H>(c, row, tag_x, v);
  }
  MARK(c, 10);
  take_mail<S>(c, e.x, tag_x, x, first, more);
}

// All layers of a stack; `norm` holds the first layer's input norm before and `after` afterwards.
template <class S, bool TALKER>
DEV void layers(Ctx& c, int position, Row<S>& x, Norm<S>& norm, const u16* norms, const u16* after) {
  Fragments<typename S::Qkv> first; preload(c, first);
  for (int l = 0; l < S::L; l++) {
    const bool more = l + 1 < S::L;
    const u16* mine = norms + l * 2 * S::H;
    layer<S, TALKER>(c, l, position, x, norm, first, mine, more ? mine + 2 * S::H : after, more);
  }
}
