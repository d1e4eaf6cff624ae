// One decoder layer as a short list of phases.
#pragma once
#include "attention.cuh"

// A thread's part of a vector: values 4 * (tid + 256 g) + i.
template <class S> struct Row { float v[S::GRANULES][4]; };
template <class S> struct Norm { u32 w[S::GRANULES][2]; };
template <class S> DEV u32 element(const Ctx& c, int g) { return 4 * (c.tid + THREADS * g); }
template <class S> DEV bool owns(const Ctx& c, int g) { return S::H % (4 * THREADS) == 0 || element<S>(c, g) < S::H; }

template <class S> DEV void load_norm(const Ctx& c, const u16* w, Norm<S>& n) {
  UNROLL for (int g = 0; g < S::GRANULES; g++) {
    n.w[g][0] = n.w[g][1] = 0;                              // a thread that owns nothing: 0 * garbage could be NaN
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
    u32* d = (u32*)(to + element<S>(c, g));
    d[0] = pack(x.v[g][0], x.v[g][1]); d[1] = pack(x.v[g][2], x.v[g][3]);
  }
}
template <class S> DEV void round_row(Row<S>& x) {
  UNROLL for (int g = 0; g < S::GRANULES; g++) UNROLL for (int i = 0; i < 4; i++) x.v[g][i] = round_bf16(x.v[g][i]);
}
template <class S> DEV void to_vec(const Ctx& c, int n, const Row<S>& x) {
  UNROLL for (int g = 0; g < S::GRANULES; g++) if (owns<S>(c, g)) {
    const u32 at = smem(vec_of(*c.s, n)) + vec_offset<S::Qkv::K>(element<S>(c, g));
    sts64(at, pack(x.v[g][0], x.v[g][1]), pack(x.v[g][2], x.v[g][3]));
  }
}
template <class S> DEV void sum_squares(const Ctx& c, int n, const Row<S>& x) {
  float ss = 0.f;
  UNROLL for (int g = 0; g < S::GRANULES; g++) UNROLL for (int i = 0; i < 4; i++) ss += x.v[g][i] * x.v[g][i];
  ss = warp_sum(ss);
  if (c.lane == 0) c.s->squares[n][c.warp] = ss;
}
template <class S> DEV float reciprocal_rms(const Ctx& c, int n) {
  float ss = 0.f; UNROLL for (int w = 0; w < WARPS; w++) ss += c.s->squares[n][w];
  return rsqrtf(ss * (1.f / S::H) + EPS);
}
// The input of the product is x * w; its result is scaled by 1 / rms afterwards, so that tensor cores hide the latter.
template <class S, int NT> DEV void weigh(const Ctx& c, const Row<S> (&x)[NT], const Norm<S>& w) {
  UNROLL for (int n = 0; n < NT; n++) {
    Row<S> y;
    UNROLL for (int g = 0; g < S::GRANULES; g++) {
      y.v[g][0] = x[n].v[g][0] * low(w.w[g][0]); y.v[g][1] = x[n].v[g][1] * high(w.w[g][0]);
      y.v[g][2] = x[n].v[g][2] * low(w.w[g][1]); y.v[g][3] = x[n].v[g][3] * high(w.w[g][1]);
    }
    to_vec<S>(c, n, y); sum_squares<S>(c, n, x[n]);
  }
  block_sync();
}
// RMSNorm whose result is also an input of later stages: rounded as the model rounds.
template <class S> DEV void final_norm(const Ctx& c, Row<S>& x, const Norm<S>& w) {
  sum_squares<S>(c, 0, x);
  block_sync();
  const float r = reciprocal_rms<S>(c, 0);
  UNROLL for (int g = 0; g < S::GRANULES; g++) UNROLL for (int i = 0; i < 4; i++)
    x.v[g][i] = round_bf16((i & 1 ? high(w.w[g][i / 2]) : low(w.w[g][i / 2])) * round_bf16(x.v[g][i] * r));
  to_vec<S>(c, 0, x);
  block_sync();
}
// Waits for the sums over groups and adds them to the residuals.
template <class S, class M, int NT>
DEV void take_sums(Ctx& c, Sums& from, Row<S> (&x)[NT], Fragments<M>& next, bool more = true) {
  if (more) preload(c, next);
  Watch w = {0, 0}; const u32 active = __activemask(); u64 v[NT][S::GRANULES][4];
  for (;;) {
    u32 bad = 0;
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int g = 0; g < S::GRANULES; g++) if (owns<S>(c, g)) {
      const u64* words = &from.word[S::ID + n][c.block % COPIES][place(element<S>(c, g))];
      get64x2(words, v[n][g][0], v[n][g][1]); get64x2(words + 2, v[n][g][2], v[n][g][3]);
    }
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int g = 0; g < S::GRANULES; g++) if (owns<S>(c, g))
      bad |= shares_missing(v[n][g], c.counts >> 8 * (S::ID + n) & 255u);
    if (__all_sync(active, bad == 0) || give_up(c, w, PARTS)) break;
  }
  UNROLL for (int n = 0; n < NT; n++) UNROLL for (int g = 0; g < S::GRANULES; g++) if (owns<S>(c, g))
    UNROLL for (int i = 0; i < 4; i++) {
      const i64 sum = (i64)(v[n][g][i] << 8) >> 8; const u32 row = element<S>(c, g) + i;
      x[n].v[g][i] = round_bf16(x[n].v[g][i] + round_bf16(from_fixed(sum)));
      if (c.group == 0 && row / S::Out::EACH == c.rank) from.was[S::ID + n][row] = sum;
    }
}
// Projects this group's inputs and adds its share to the sums that all blocks read.
template <class S, class D, int NT> DEV void project_parts(Ctx& c, Fragments<D>& w, Sums& to) {
  multiply<D, NT, true>(c, w, [&](int row, const float (&v)[NT]) {
    if (row >= 0) UNROLL for (int n = 0; n < NT; n++)
      send_share(to.word[S::ID + n], c.rank * D::EACH + row, v[n]);
  });
}
// Subtracts the last sums from their words, after every block has read them and before this block adds new shares.
// In two steps: group 0's rows are fetched ahead; otherwise all blocks would wait for group 0.
template <class S, int NT> struct Taken {
  static constexpr u32 ROWS = NT * S::Out::EACH;
  u64 v[ceil_div(ROWS, THREADS)];
};
template <class S, int NT> DEV void fetch_taken(const Ctx& c, const Sums& of, Taken<S, NT>& t) {
  constexpr u32 EACH = S::Out::EACH;
  UNROLL for (u32 i = 0; i < ceil_div(t.ROWS, THREADS); i++) {
    const u32 at = c.tid + i * THREADS, row = c.rank * EACH + at % EACH;
    t.v[i] = c.group == 0 && at < t.ROWS && row < S::H ? fetch64(&of.was[S::ID + at / EACH][row]) : 0;
  }
}
template <class S, int NT> DEV void take_back(const Ctx& c, Sums& of, const Taken<S, NT>& t) {
  constexpr u32 EACH = S::Out::EACH;
  if (c.group == 0) UNROLL for (u32 i = 0; i < ceil_div(t.ROWS, THREADS); i++) {
    const u32 at = c.tid + i * THREADS, row = c.rank * EACH + at % EACH;
    if (at < t.ROWS && row < S::H) add_to(of.word[S::ID + at / EACH], row, -t.v[i]);
  }
}

// The exchanges of one layer, by their offset from the layer's first tag.
enum : u32 { TAG_QKV = 1, TAG_ATT, TAG_ACT, LAYER_EXCHANGES = TAG_ACT };

// One layer for NT positions, of which `position` is the first.
// `first`: this layer's query-key-value fragments; on return, if there are `more` layers, those of the next one.
// `norm`: the input norm's weights; on return, the weights of `next_norm`.
template <class S, bool TALKER, int NT>
DEV void layer(Ctx& c, int l, int position, Row<S> (&x)[NT], Norm<S>& norm, Fragments<typename S::Qkv>& first,
               const u16* norms, const u16* next_norm, bool more) {
  Shared& s = *c.s; Exchange& e = *c.p->exchange;
  const u32 tag_qkv = c.tag + TAG_QKV, tag_att = c.tag + TAG_ATT, tag_act = c.tag + TAG_ACT;
  c.tag += LAYER_EXCHANGES; UNROLL for (int n = 0; n < NT; n++) expect_shares(c, S::ID + n);
  MARK(c, 1);
  Taken<S, NT> last_h; fetch_taken<S, NT>(c, e.h, last_h);
  weigh<S>(c, x, norm);                                     // 1. queries, keys, values of the group
  MARK(c, 2);
  multiply<typename S::Qkv, NT>(c, first, [&](int row, const float (&v)[NT]) {
    UNROLL for (int n = 0; n < NT; n++) {
      const float scaled = v[n] * reciprocal_rms<S>(c, n);
      if (row >= 0) publish(&e.qkv[c.group][n][c.rank * S::Qkv::EACH + row], tag_qkv, scaled);
    }
  });
  MARK(c, 3);
  take_back<S, NT>(c, e.h, last_h);                         // every block with this layer's residual has read last h
  load_norm<S>(c, norms + S::H, norm);
  Fragments<typename S::Out> out;                           // 2. attention; its output is the input of 3
  if constexpr (TALKER) talker_attention(c, l, position, tag_qkv, tag_att, out);
  else { preload(c, out); predictor_attention<NT>(c, l, position, tag_qkv); }
  MARK(c, 4);
  project_parts<S, typename S::Out, NT>(c, out, e.h);       // 3. output projection of this group, summed over groups
  MARK(c, 5);
  Fragments<typename S::GateUp> gate_up;
  take_sums<S>(c, e.h, x, gate_up);
  MARK(c, 6);
  Taken<S, NT> last_x; fetch_taken<S, NT>(c, e.x, last_x);
  weigh<S>(c, x, norm);                                     // 4. gate and up
  MARK(c, 7);
  multiply<typename S::GateUp, NT>(c, gate_up, [&](int row, const float (&v)[NT]) {
    typedef typename S::GateUp M;
    UNROLL for (int n = 0; n < NT; n++) {
      const float gate = round_bf16(v[n] * reciprocal_rms<S>(c, n)), up = shuffle_xor(gate, Rows<M::TILES>::LANES);
      if (row >= 0 && !(row & 1))
        publish(&e.act[n][c.group * S::INNER + c.rank * (M::EACH / 2) + row / 2], tag_act,
                round_bf16(__fdividef(gate, 1.f + __expf(-gate))) * up);
    }
  });
  MARK(c, 8);
  take_back<S, NT>(c, e.x, last_x);
  load_norm<S>(c, next_norm, norm);
  Fragments<typename S::Down> down; preload(c, down);
  UNROLL for (int n = 0; n < NT; n++) for (u32 i = c.tid * 4; i < S::INNER; i += THREADS * 4) {
    u32 a, b; poll4(c, &e.act[n][c.group * S::INNER + i], tag_act, a, b);
    sts64(smem(s.inner[n]) + vec_offset<S::Down::K>(i), a, b);
  }
  block_sync();
  MARK(c, 9);
  project_parts<S, typename S::Down, NT>(c, down, e.x);     // 5. down projection of this group, summed over groups
  MARK(c, 10);
  take_sums<S>(c, e.x, x, first, more);
}

// All layers of a stack; `norm` holds the first layer's input norm at the start and `after` at the end.
// `hidden`: optional; receives the residual after every layer.
template <class S, bool TALKER, int NT>
DEV void layers(Ctx& c, int position, Row<S> (&x)[NT], Norm<S>& norm, const u16* norms, const u16* after,
                u16* hidden = nullptr) {
  Fragments<typename S::Qkv> first; preload(c, first);
  for (int l = 0; l < S::L; l++) {
    const bool more = l + 1 < S::L;
    const u16* mine = norms + l * 2 * S::H;
    layer<S, TALKER, NT>(c, l, position, x, norm, first, mine, more ? mine + 2 * S::H : after, more);
    if (TALKER && hidden && c.block == 0) store_row<S>(c, hidden + l * S::H, x[0]);
  }
}
