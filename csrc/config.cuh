// Dimensions of one checkpoint, as compile-time constants. Every number in the kernel is defined here or derived from
// these. The host defines T_* (talker) and P_* (code predictor): hidden, feed-forward, layers, vocabulary; NQ, NKV, HD
// (heads and their width) and CTAS (blocks), from the checkpoint's config.json and the device; and RING (the number of
// 16 KiB stages that fit).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEV __device__ __forceinline__
#define UNROLL _Pragma("unroll")

constexpr int WARPS = 8;                 // consumer warps; one more warp feeds the ring
constexpr int THREADS = WARPS * 32;      // consumer threads
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int FEED_THREADS = 128;        // a warpgroup, so that its registers can be given to the consumers
#else
constexpr int FEED_THREADS = 32;
#endif
constexpr int GROUP = CTAS / NKV;        // thread blocks that share one key-value head
constexpr int QPK = NQ / NKV;            // query heads per key-value head
constexpr float EPS = 1e-6f;             // rms_norm_eps of every released checkpoint; the host rejects others
constexpr int CODES = 16;                // codebooks per frame
constexpr int FRAG_BYTES = 512;          // one mma.m16n8k16 A operand of one warp
constexpr int FRAGS = 4;                 // fragments a warp takes from one ring stage
constexpr int STAGE_BYTES = WARPS * FRAGS * FRAG_BYTES;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int power_of_two(int least) {
  return least <= 1 ? 1 : 2 * power_of_two(ceil_div(least, 2));
}

// A block's part of one matrix: its `rows`, `k` inputs (both padded), in tiles of two rows split into 8 parts.
template <int ROWS_, int K_> struct Mat {
  static constexpr int K = round_up(K_, 128);
  static constexpr int STEPS = K / 128;                     // 16-wide k-steps of each of the 8 parts
  static constexpr int TILES = ceil_div(ROWS_, 2 * WARPS);  // per warp
  static constexpr int WARP_ROWS = 2 * TILES;
  static constexpr int FRAGMENTS = TILES * STEPS;           // per warp
  static constexpr int STAGES = ceil_div(FRAGMENTS, FRAGS);
  static constexpr int BYTES = FRAGMENTS * WARPS * FRAG_BYTES;
};
// A group's TOTAL rows, dealt out to its blocks in order and UNIT by UNIT: EACH to a block, fewer or none to the last
// where they do not divide. More than eight tiles, which are 32 sums a lane and position, would not leave registers
// enough: a block then takes COUNT matrices of CHUNK rows, one after another, of four to eight tiles as they pad least.
constexpr int TILE_ROWS = 2 * WARPS, MOST_ROWS = 8 * TILE_ROWS;
__host__ __device__ constexpr int dealt(int total, int unit) { return unit * ceil_div(total / unit, GROUP); }
__host__ __device__ constexpr int chunk(int each) {
  if (each <= MOST_ROWS) return round_up(each, TILE_ROWS);
  int best = MOST_ROWS / 2;
  for (int rows = best + TILE_ROWS; rows <= MOST_ROWS; rows += TILE_ROWS)
    if (round_up(each, rows) < round_up(each, best)) best = rows;
  return best;
}
template <int TOTAL_, int K_, int UNIT = 1> struct Dealt : Mat<chunk(dealt(TOTAL_, UNIT)), K_> {
  typedef Mat<chunk(dealt(TOTAL_, UNIT)), K_> One;
  static constexpr int TOTAL = TOTAL_, EACH = dealt(TOTAL, UNIT), CHUNK = chunk(EACH), COUNT = ceil_div(EACH, CHUNK);
  static constexpr int BYTES = COUNT * One::BYTES;
  static_assert((GROUP - 1) * EACH < TOTAL, "a block that sent nothing would be waited for by none: exchange.cuh");
};

template <int ID_, int H_, int F_, int L_> struct Stack {
  static constexpr int ID = ID_, H = H_, F = F_, L = L_;
  static constexpr int GRANULES = ceil_div(H, 4 * THREADS);  // groups of 4 residual values that a thread owns
  static constexpr int ATT = QPK * HD;                       // attention outputs of a group
  static constexpr int INNER = F / NKV;                      // activations of a group
  typedef Dealt<ATT + 2 * HD, H> Qkv;
  typedef Dealt<H, ATT> Out;
  typedef Dealt<2 * INNER, H, 2> GateUp;                     // rows of gate and up alternate
  typedef Dealt<H, INNER> Down;
  static constexpr int LAYER_BYTES = Qkv::BYTES + Out::BYTES + GateUp::BYTES + Down::BYTES;
  static_assert(H % 4 == 0 && F % NKV == 0 && INNER % 4 == 0, "values are handed over in fours");
};

typedef Stack<0, T_H, T_F, T_L> Talker;
typedef Stack<1, P_H, P_F, P_L> Predictor;
constexpr int VT = T_VOCAB, VP = P_VOCAB;
constexpr int SEEN_WORDS = VT < 1 << 16 ? VT / 32 : 1;   // a text model keeps no history
typedef Mat<ceil_div(VT, CTAS), T_H> TalkerHead;
typedef Mat<ceil_div(VP, CTAS), P_H> PredictorHead;
typedef Mat<ceil_div(P_H, CTAS), T_H> Projection;   // small_to_mtp, where the talker is wider than the predictor
constexpr bool PROJECTED = T_H != P_H;
constexpr int MAXH = T_H > P_H ? T_H : P_H;
// The number of attention outputs that a block completes, all of one head, and the number of blocks that do so.
constexpr int SHARE = power_of_two(ceil_div(QPK * HD, GROUP)), SHARES = QPK * HD / SHARE;

// The stride, in elements, between the 8 parts of a vector in shared memory: with words % 16 == 8 they are in different
// banks.
__host__ __device__ constexpr int part_stride(int k) {
  const int words = k / 16;
  return 2 * (words % 16 == 8 ? words : words / 16 * 16 + (words % 16 > 8 ? 24 : 8));
}
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int vec_elements(int k) {
  return 8 * larger(part_stride(round_up(k, 128)), round_up(k, 128) / 8 + 16);
}
constexpr int VEC_P = vec_elements(P_H), VEC = larger(vec_elements(T_H), VEC_P);
// A group's attention outputs, or its activations.
constexpr int VEC_INNER = vec_elements(larger(QPK * HD, larger(T_F, P_F) / NKV));
static_assert(GROUP <= 32 && HD % SHARE == 0, "a lane for each block of a group, a head for each share");
static_assert(CTAS % NKV == 0 && HD % 32 == 0 && HD <= 128 && WARPS % QPK == 0 && QPK + 2 <= WARPS,
              "heads map onto warps");
