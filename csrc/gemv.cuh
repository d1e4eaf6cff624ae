// Matrix-vector products on tensor cores. A 16 x 16 A tile holds two output rows, each split into eight parts along k;
// column p of B holds part p of the vector, so the required products are the diagonal of D, in fp32.
#pragma once
#include "ring.cuh"

// Sums the eight diagonal values of each row over the lanes. Returns the sum of this lane's row: with R = rows rounded
// up to a power of two, row = the top log2(R) bits of the lane.
template <int TILES> struct Rows {
  static constexpr int COUNT = 2 * TILES;
  static constexpr int POW2 = COUNT <= 2 ? 2 : COUNT <= 4 ? 4 : COUNT <= 8 ? 8 : COUNT <= 16 ? 16 : 32;
  static constexpr int LANES = 32 / POW2;    // lanes that hold the same row
  static_assert(TILES <= 16, "a warp has a lane for each of its rows");
};
template <int TILES> DEV float sum_diagonal(const Ctx& c, const float (&d)[TILES][4]) {
  constexpr int N = Rows<TILES>::POW2;
  const bool mine = (c.lane & 3) == (c.lane >> 3), odd = (c.lane >> 2) & 1;
  float v[N];
  UNROLL for (int t = 0; t < N / 2; t++) {
    v[2 * t] = t < TILES && mine ? (odd ? d[t < TILES ? t : 0][1] : d[t < TILES ? t : 0][0]) : 0.f;
    v[2 * t + 1] = t < TILES && mine ? (odd ? d[t < TILES ? t : 0][3] : d[t < TILES ? t : 0][2]) : 0.f;
  }
  int n = N;
  UNROLL for (int m = 16; m; m >>= 1) {
    if (n > 1) {
      const bool up = c.lane & m; const int half = n / 2;
      UNROLL for (int i = 0; i < N / 2; i++) if (i < half) {
        const float keep = up ? v[i + half] : v[i], send = up ? v[i] : v[i + half];
        v[i] = keep + shuffle_xor(send, m);
      }
      n = half;
    } else v[0] += shuffle_xor(v[0], m);
  }
  return v[0];
}

// Weights do not wait for activations: a warp loads its fragments of the next matrix from the ring before the exchange.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int PRELOAD = 16;
#else
constexpr int PRELOAD = 8;               // 168 registers a thread, not 232
#endif
template <class M> struct Fragments {
  static constexpr int N = M::FRAGMENTS < PRELOAD ? M::FRAGMENTS : PRELOAD;
  u32 a[N][4];
};
template <class M> DEV void take_stage(Ctx& c, int s, u32 (*a)[4]) {
  const int n = M::FRAGMENTS - s * FRAGS < FRAGS ? M::FRAGMENTS - s * FRAGS : FRAGS;
  const u32 from = ring_wait(c) + c.warp * n * FRAG_BYTES + c.lane * 16;
  UNROLL for (int f = 0; f < FRAGS; f++) if (f < n) lds128(from + f * FRAG_BYTES, a[f]);
  ring_release(c);
}
template <class M> DEV void preload(Ctx& c, Fragments<M>& w) {
  UNROLL for (int s = 0; s < ceil_div(Fragments<M>::N, FRAGS); s++) take_stage<M>(c, s, w.a + s * FRAGS);
}
// Multiplies M by each vector n -> this lane's row sums. Vectors are in shared memory in 8 padded parts: a residual, or
// with INNER an inner vector.
template <class M, int NT, bool INNER = false> DEV void gemv(Ctx& c, const Fragments<M>& w, float (&sums)[NT]) {
  constexpr int STRIDE = part_stride(M::K) * 2;   // bytes
  u32 b[NT][M::STEPS][2];
  float acc[NT][M::TILES][4];
  UNROLL for (int n = 0; n < NT; n++) {
    const u32 v = smem(INNER ? c.s->inner[n] : vec_of(*c.s, n)) + (c.lane >> 2) * STRIDE + (c.lane & 3) * 8;
    UNROLL for (int k = 0; k < M::STEPS; k++) lds64(v + k * 32, b[n][k][0], b[n][k][1]);
    UNROLL for (int t = 0; t < M::TILES; t++) UNROLL for (int i = 0; i < 4; i++) acc[n][t][i] = 0.f;
  }
  UNROLL for (int i = 0; i < Fragments<M>::N; i++) UNROLL for (int n = 0; n < NT; n++)
    mma(acc[n][i % M::TILES], w.a[i], b[n][i / M::TILES][0], b[n][i / M::TILES][1]);
  UNROLL for (int s = Fragments<M>::N / FRAGS; s < M::STAGES; s++) if (Fragments<M>::N < M::FRAGMENTS) {
    u32 a[FRAGS][4]; take_stage<M>(c, s, a);
    UNROLL for (int f = 0; f < FRAGS; f++) {
      const int i = s * FRAGS + f;
      if (i < M::FRAGMENTS) UNROLL for (int n = 0; n < NT; n++)
        mma(acc[n][i % M::TILES], a[f], b[n][i / M::TILES][0], b[n][i / M::TILES][1]);
    }
  }
  UNROLL for (int n = 0; n < NT; n++) sums[n] = sum_diagonal<M::TILES>(c, acc[n]);
}
// The row, within this block's rows, that this lane holds after gemv; -1 if none, or if another lane reports it.
template <class M> DEV int held_row(const Ctx& c, int rows) {
  const u32 row = c.lane / Rows<M::TILES>::LANES, at = c.warp * M::WARP_ROWS + row;
  return c.lane % Rows<M::TILES>::LANES == 0 && row < M::WARP_ROWS && (int)at < rows ? (int)at : -1;
}
// Multiplies this block's rows by the vectors: calls `each` with a row, or -1 as above, and its sums. `w` holds the
// first fragments.
template <class D, int NT, bool INNER = false, class F> DEV void multiply(Ctx& c, Fragments<D>& w, F each) {
  constexpr bool ALL = D::TOTAL == D::EACH * GROUP;
  const int rows = ALL || D::EACH < D::TOTAL - (int)c.rank * D::EACH ? D::EACH : D::TOTAL - (int)c.rank * D::EACH;
  _Pragma("unroll 1") for (int i = 0; i < D::COUNT; i++) {
    if (i) preload(c, w);
    float v[NT]; gemv<D, NT, INNER>(c, w, v);
    const int row = held_row<D>(c, rows - i * D::CHUNK);
    each(row < 0 ? row : i * D::CHUNK + row, v);
  }
}
// The byte offset of value i of a vector of length K in vec.
template <int K> DEV u32 vec_offset(u32 i) {
  constexpr u32 part = K / 8, stride = part_stride(K);
  return (i / part * stride + i % part) * 2;
}
