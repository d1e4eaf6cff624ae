// Unpacks one layer of the talker's weight tape to row-major matrices, as needed for products of many rows: the inverse
// of pack_layer in mktts/kernel/tape.py. One thread block in x for each tape; blocks in y share its fragments.
#include "config.cuh"

struct Unpack {
  const u8* tape;               // of block 0, at the layer
  u64 block_bytes;              // from one block's tape to the next
  u16 *qkv, *out, *gate_up, *down;   // (queries, keys, values; H), (H, queries), (gates, ups; H), (H, F)
};

constexpr int AHEAD = 4;        // loads that a thread has in flight

// Unpacks one matrix of a block: its fragments start at `tape`, and `rows` rows of it are used; row(r) is the address
// of row r.
template <class M, int INPUTS, class Row> DEV const uint4* unpack(const uint4* tape, int rows, Row row) {
  static_assert(INPUTS % 4 == 0, "a lane's four columns are stored together");
  constexpr int ALL = WARPS * M::FRAGMENTS, LANES = 32;
  const int lane = threadIdx.x % LANES, part = lane / 4;
  const int mine = (blockIdx.y * blockDim.x + threadIdx.x) / LANES, step_by = gridDim.y * blockDim.x / LANES;
  for (int from = mine; from < ALL; from += AHEAD * step_by) {
    uint4 v[AHEAD];
    UNROLL for (int u = 0; u < AHEAD; u++) {
      const int at = from + u * step_by;
      if (at < ALL) v[u] = __ldcs(tape + at * LANES + lane);   // read once: leaves L2 to the unpacked matrices
    }
    UNROLL for (int u = 0; u < AHEAD; u++) {
      const int at = from + u * step_by;
      if (at >= ALL) continue;
      const int stage = at / (WARPS * FRAGS), rest = at % (WARPS * FRAGS);
      const int left = M::FRAGMENTS - stage * FRAGS, each = left < FRAGS ? left : FRAGS;   // of a warp in this stage
      const int fragment = stage * FRAGS + rest % each;
      const int first = (rest / each * M::TILES + fragment % M::TILES) * 2;
      const int column = part * (M::K / 8) + fragment / M::TILES * 16 + lane % 4 * 4;
      if (column >= INPUTS) continue;
      if (first < rows) *(uint2*)(row(first) + column) = make_uint2(v[u].x, v[u].z);
      if (first + 1 < rows) *(uint2*)(row(first + 1) + column) = make_uint2(v[u].y, v[u].w);
    }
  }
  return tape + ALL * LANES;
}
// Unpacks all matrices of a block's rows; row(r) is the address of the block's row r.
template <class D, int INPUTS, class Row> DEV const uint4* unpack_dealt(const uint4* tape, Row row) {
  const int left = D::TOTAL - (int)blockIdx.x % GROUP * D::EACH;
  const int rows = D::TOTAL == D::EACH * GROUP || left > D::EACH ? D::EACH : left;
  for (int i = 0; i < D::COUNT; i++)
    tape = unpack<D, INPUTS>(tape, rows - i * D::CHUNK, [&](int r) { return row(i * D::CHUNK + r); });
  return tape;
}

extern "C" __device__ const u32 mktts_layer_bytes = Talker::LAYER_BYTES;
extern "C" __device__ const u32 mktts_params_bytes = sizeof(Unpack);

extern "C" __global__ void mktts_unpack(const __grid_constant__ Unpack p) {
  typedef Talker S;
  constexpr int H = S::H, F = S::F, IN = S::INNER;
  const int head = blockIdx.x / GROUP, share = blockIdx.x % GROUP;
  const uint4* tape = (const uint4*)(p.tape + blockIdx.x * p.block_bytes);
  tape = unpack_dealt<S::Qkv, H>(tape, [&](int r) {
    const int at = share * S::Qkv::EACH + r;     // of the head's queries, its key and its value
    const int kind = at < S::ATT ? 0 : at < S::ATT + HD ? NQ * HD : (NQ + NKV) * HD;
    return p.qkv + (i64)(kind + (at < S::ATT ? head * S::ATT + at : head * HD + (at - S::ATT) % HD)) * H;
  });
  tape = unpack_dealt<S::Out, S::ATT>(tape, [&](int r) {
    return p.out + (i64)(share * S::Out::EACH + r) * (NQ * HD) + head * S::ATT;
  });
  tape = unpack_dealt<S::GateUp, H>(tape, [&](int r) {
    return p.gate_up + (i64)(r % 2 * F + head * IN + share * (S::GateUp::EACH / 2) + r / 2) * H;
  });
  unpack_dealt<S::Down, IN>(tape, [&](int r) {
    return p.down + (i64)(share * S::Down::EACH + r) * F + head * IN;
  });
}
