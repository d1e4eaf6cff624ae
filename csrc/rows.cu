// Computes one layer of the talker for up to 16 rows of a prompt, directly from its tape: five ordinary kernels, one
// for each phase. Values between them are rounded to bf16 where transformers 4.57 rounds (mktts/model/qwen3.py).
//
// A tape's fragment is laid out for two rows of a matrix and one vector (gemv.cuh). With another distribution to warps
// it serves sixteen rows: eight times four lanes hold, of eight fragments, one of the eight parts along k, which is the
// B operand of two products whose A operand is the prompt. So warp p multiplies part p, and eight sums give an output.
#include "ptx.cuh"

constexpr int ROWS = 16;        // of the prompt, padded: the A operand of mma.m16n8k16
constexpr int TILE = 16;        // rows of a matrix that are multiplied together
constexpr int AHEAD = 16;       // weight loads that a lane has in flight, 16 bytes each
constexpr int MOST_KEYS = 512;  // positions that a row can attend to
constexpr int OLD = 8;          // cached positions that a warp reads at a time

struct RowsParams {
  const u8* tape;               // of block 0, at the layer
  u64 block_bytes;              // from one block's tape to the next
  const u16 *input_norm, *post_norm, *q_norm, *k_norm;
  const u16* rotary;            // (positions, 2, HD): cosines; sines, whose first half is negated
  u16 *x;                       // (ROWS, H), the residual
  u16 *heads, *attended, *active;   // (ROWS, queries, keys, values), (ROWS, queries), (ROWS, F)
  u16 *keys, *values;           // (NKV, positions, HD), of the layer
  const i64 *past, *end;        // filled positions, before and after
  u64 positions;
};

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ RowsParams p)
typedef Talker S;
constexpr int KEYS = NQ * HD, VALUES = KEYS + NKV * HD, WIDTH = VALUES + NKV * HD;   // offsets in a row of heads
constexpr int OUT_AT = S::Qkv::BYTES, GATE_AT = OUT_AT + S::Out::BYTES, DOWN_AT = GATE_AT + S::GateUp::BYTES;

struct Sums { float part[WARPS][ROWS][TILE + 1]; };

// Loads this lane's 16 bytes of part `warp` of eight fragments of step k. `tile` counts through all matrices of the
// block's rows.
template <class D> DEV void load(const u8* tape, int tile, int k, u32 (&v)[4]) {
  constexpr int TILES = D::CHUNK / TILE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pair = tile % TILES * (TILE / 2) + lane / 4, fragment = k * D::TILES + pair % D::TILES;
  const int stage = fragment / FRAGS, left = D::FRAGMENTS - stage * FRAGS, each = left < FRAGS ? left : FRAGS;
  const int at = stage * WARPS * FRAGS + pair / D::TILES * each + fragment % FRAGS;
  fetch16(tape + tile / TILES * (u64)D::One::BYTES + (u64)at * FRAG_BYTES + (warp * 4 + lane % 4) * 16, v);
}
// Multiplies the matrix's even rows of a tile, then its odd ones.
DEV void multiply(float (&sums)[2][4], const u32 (&rows)[4], const u32 (&v)[4]) {
  mma(sums[0], rows, v[0], v[2]);
  mma(sums[1], rows, v[1], v[3]);
}
// Adds the sums of the parts in order and calls each(row of the prompt, pair of the tile's rows, both sums).
template <class F> DEV void finish(Sums& all, const float (&sums)[2][4], F each) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  block_sync();                                    // the tile before has been read
  UNROLL for (int odd = 0; odd < 2; odd++) UNROLL for (int i = 0; i < 4; i++)
    all.part[warp][g + i / 2 * 8][2 * (2 * t + i % 2) + odd] = sums[odd][i];
  block_sync();
  if (threadIdx.x < ROWS * TILE / 2) {
    const int row = threadIdx.x / (TILE / 2), pair = threadIdx.x % (TILE / 2);
    float a = 0.f, b = 0.f;
    UNROLL for (int p = 0; p < WARPS; p++) { a += all.part[p][row][2 * pair]; b += all.part[p][row][2 * pair + 1]; }
    each(row, pair, a, b);
  }
}
// Loads four adjacent values of two rows as part of the A operand; zero beyond `inputs`. Not by the read-only path, as
// an early block's kernel has begun before they were written.
DEV void row_operand(const u16* x, int stride, int column, int inputs, u32 (&a)[4]) {
  const int g = threadIdx.x % 32 / 4;
  UNROLL for (int i = 0; i < 2; i++) {
    const u64 four = column < inputs ? fetch64(x + (i64)(g + 8 * i) * stride + column) : 0;
    a[i] = (u32)four; a[2 + i] = (u32)(four >> 32);
  }
}

// Multiplies the normed residual by this block's rows: calls each(row of the prompt, row of the block, two sums).
template <class D, class F> DEV void multiply_normed(const RowsParams& p, const u8* tape, const u16* norm, F each) {
  constexpr int TILES = D::COUNT * D::CHUNK / TILE, UNITS = TILES * D::STEPS, H = S::H;
  __shared__ Sums sums; __shared__ float squares[WARPS][ROWS];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  u32 v[AHEAD][4];
  UNROLL for (int u = 0; u < AHEAD; u++) if (u < UNITS) load<D>(tape, u / D::STEPS, u % D::STEPS, v[u]);
  let_next_come(); wait_for_last();                // weight loads do not wait for the previous kernel
  u32 a[D::STEPS][4];
  float square[2] = {0.f, 0.f};
  UNROLL for (int k = 0; k < D::STEPS; k++) {
    row_operand(p.x, H, warp * (D::K / 8) + k * 16 + t * 4, H, a[k]);
    UNROLL for (int i = 0; i < 4; i++) square[i % 2] += low(a[k][i]) * low(a[k][i]) + high(a[k][i]) * high(a[k][i]);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    UNROLL for (int m = 1; m < 4; m <<= 1) square[i] += shuffle_xor(square[i], m);
    if (t == 0) squares[warp][g + 8 * i] = square[i];
  }
  block_sync();
  float scale[2];
  UNROLL for (int i = 0; i < 2; i++) {
    float sum = 0.f;
    UNROLL for (int w = 0; w < WARPS; w++) sum += squares[w][g + 8 * i];
    scale[i] = rsqrtf(sum / H + EPS);
  }
  UNROLL for (int k = 0; k < D::STEPS; k++) {
    const int column = warp * (D::K / 8) + k * 16 + t * 4;
    u32 w[2] = {0, 0};
    if (column < H) fetch8(norm + column, w[0], w[1]);
    UNROLL for (int i = 0; i < 4; i++) {
      const float s = scale[i % 2];
      a[k][i] = pack(round_bf16(low(a[k][i]) * s) * low(w[i / 2]), round_bf16(high(a[k][i]) * s) * high(w[i / 2]));
    }
  }
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    float out[2][4] = {};
    UNROLL for (int k = 0; k < D::STEPS; k++) {
      const int u = tile * D::STEPS + k;
      multiply(out, a[k], v[u % AHEAD]);
      if (u + AHEAD < UNITS) load<D>(tape, (u + AHEAD) / D::STEPS, (u + AHEAD) % D::STEPS, v[u % AHEAD]);
    }
    finish(sums, out, [&](int row, int pair, float a, float b) { each(row, tile * TILE + 2 * pair, a, b); });
  }
}
// Multiplies one tile over all groups, each with INPUTS columns of `from`, and adds the result to the residual.
template <class D, int INPUTS> DEV void multiply_groups(const RowsParams& p, u64 tape_at, const u16* from) {
  constexpr int UNITS = NKV * D::STEPS;
  __shared__ Sums sums;
  const int warp = threadIdx.x / 32, t = threadIdx.x % 4, share = blockIdx.x, tile = blockIdx.y;
  u32 v[AHEAD][4], a[AHEAD][4];
  const auto weights = [&](int u, u32 (&to)[4]) {
    load<D>(p.tape + (u / D::STEPS * GROUP + share) * p.block_bytes + tape_at, tile, u % D::STEPS, to);
  };
  const auto rows = [&](int u, u32 (&to)[4]) {
    const int column = warp * (D::K / 8) + u % D::STEPS * 16 + t * 4;
    row_operand(from + u / D::STEPS * INPUTS, NKV * INPUTS, column, INPUTS, to);
  };
  UNROLL for (int u = 0; u < AHEAD; u++) if (u < UNITS) weights(u, v[u]);
  let_next_come(); wait_for_last();
  UNROLL for (int u = 0; u < AHEAD; u++) if (u < UNITS) rows(u, a[u]);
  float out[2][4] = {};
  UNROLL for (int u = 0; u < UNITS; u++) {
    multiply(out, a[u % AHEAD], v[u % AHEAD]);
    if (u + AHEAD < UNITS) { weights(u + AHEAD, v[u % AHEAD]); rows(u + AHEAD, a[u % AHEAD]); }
  }
  finish(sums, out, [&](int row, int pair, float even, float odd) {
    UNROLL for (int i = 0; i < 2; i++) {
      const int own = tile * TILE + 2 * pair + i, at = share * D::EACH + own;
      if (own >= D::EACH || at >= D::TOTAL) continue;
      u16* x = p.x + (i64)row * S::H + at;
      *x = to_bf16(from_bf16(*x) + round_bf16(i ? odd : even));
    }
  });
}

KERNEL(mktts_rows_qkv) {
  typedef S::Qkv D;
  const int head = blockIdx.x / GROUP, share = blockIdx.x % GROUP;
  multiply_normed<D>(p, p.tape + blockIdx.x * p.block_bytes, p.input_norm, [&](int row, int own, float a, float b) {
    UNROLL for (int i = 0; i < 2; i++) {
      const int at = share * D::EACH + own + i;    // of the head's queries, its key and its value
      if (own + i >= D::EACH || at >= D::TOTAL) continue;
      const int place = at < S::ATT ? head * S::ATT + at
                                    : (at < S::ATT + HD ? KEYS : VALUES) + head * HD + (at - S::ATT) % HD;
      p.heads[row * WIDTH + place] = to_bf16(i ? b : a);
    }
  });
}
KERNEL(mktts_rows_out) { multiply_groups<S::Out, S::ATT>(p, OUT_AT, p.attended); }
KERNEL(mktts_rows_gate_up) {
  typedef S::GateUp D;                             // rows of gate and up alternate
  const int head = blockIdx.x / GROUP, share = blockIdx.x % GROUP;
  const u8* tape = p.tape + blockIdx.x * p.block_bytes + GATE_AT;
  multiply_normed<D>(p, tape, p.post_norm, [&](int row, int own, float gate, float up) {
    const int at = share * D::EACH + own;
    if (own >= D::EACH || at >= D::TOTAL) return;
    gate = round_bf16(gate);
    const float silu = round_bf16(gate / (1.f + __expf(-gate)));
    p.active[row * S::F + head * S::INNER + at / 2] = to_bf16(silu * round_bf16(up));
  });
}
KERNEL(mktts_rows_down) { multiply_groups<S::Down, S::INNER>(p, DOWN_AT, p.active); }

// ---- attention of one row and head, by one block

constexpr int PAIRS = ceil_div(HD / 2, 32);        // rotated pairs of values that a lane holds of a head
struct Head { float first[PAIRS], second[PAIRS]; };
DEV bool held(int i, int& at) { at = i * 32 + threadIdx.x % 32; return at < HD / 2; }
DEV Head read_head(const u16* from) {
  Head h; int at;
  UNROLL for (int i = 0; i < PAIRS; i++) {
    const bool mine = held(i, at);
    h.first[i] = mine ? from_bf16(from[at]) : 0.f; h.second[i] = mine ? from_bf16(from[HD / 2 + at]) : 0.f;
  }
  return h;
}
// Reads a head, applies its norm and rotates it to its position.
DEV Head turned(const u16* from, const u16* norm, const u16* rotary) {
  Head h = read_head(from);
  const Head w = read_head(norm), cos = read_head(rotary), sin = read_head(rotary + HD);
  float square = 0.f;
  UNROLL for (int i = 0; i < PAIRS; i++) square += h.first[i] * h.first[i] + h.second[i] * h.second[i];
  const float scale = rsqrtf(warp_sum(square) / HD + EPS);
  UNROLL for (int i = 0; i < PAIRS; i++) {
    const float a = round_bf16(round_bf16(h.first[i] * scale) * w.first[i]);
    const float b = round_bf16(round_bf16(h.second[i] * scale) * w.second[i]);
    h.first[i] = round_bf16(round_bf16(a * cos.first[i]) + round_bf16(b * sin.first[i]));
    h.second[i] = round_bf16(round_bf16(b * cos.second[i]) + round_bf16(a * sin.second[i]));
  }
  return h;
}
DEV float times(const Head& a, const Head& b) {
  float sum = 0.f;
  UNROLL for (int i = 0; i < PAIRS; i++) sum += a.first[i] * b.first[i] + a.second[i] * b.second[i];
  return warp_sum(sum);
}
struct Attention { float weight[MOST_KEYS], most[WARPS], part[THREADS]; };

KERNEL(mktts_rows_attend) {
  constexpr int PARTS = THREADS / HD;              // of the values, summed separately
  __shared__ Attention all;
  const int head = blockIdx.x, row = blockIdx.y, kv = head / QPK, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_come(); wait_for_last();
  const int past = *p.past, position = past + row, seen = position + 1;
  u16* out = p.attended + row * KEYS + head * HD;
  if (position >= *p.end) {                        // padding must be finite, because it is multiplied later
    if (threadIdx.x < HD) out[threadIdx.x] = 0;
    return;
  }
  u16 *keys = p.keys + kv * p.positions * HD, *values = p.values + kv * p.positions * HD;
  const auto own = [&](int place, int i) { return p.heads + i * WIDTH + place + kv * HD; };
  const auto angle = [&](int at) { return p.rotary + (i64)at * 2 * HD; };
  const Head query = turned(p.heads + row * WIDTH + head * HD, p.q_norm, angle(position));
  const float scale = rsqrtf((float)HD);
  float most = -__uint_as_float(0x7f800000u);
  const auto take = [&](int at, const Head& key) {
    const float score = times(query, key) * scale;
    if (lane == 0) all.weight[at] = score;
    most = most > score ? most : score;
  };
  for (int first = warp; first < past; first += OLD * WARPS) {
    Head key[OLD];                                 // loads in flight together
    UNROLL for (int i = 0; i < OLD; i++) {
      const int at = first + i * WARPS;
      if (at < past) key[i] = read_head(keys + (i64)at * HD);
    }
    UNROLL for (int i = 0; i < OLD; i++) if (first + i * WARPS < past) take(first + i * WARPS, key[i]);
  }
  for (int at = past + warp; at < seen; at += WARPS) {
    const Head key = turned(own(KEYS, at - past), p.k_norm, angle(at));
    take(at, key);
    int d;
    if (at == position && head % QPK == 0) UNROLL for (int i = 0; i < PAIRS; i++) if (held(i, d)) {
      u16 *key_to = keys + (i64)at * HD + d, *value_to = values + (i64)at * HD + d;
      key_to[0] = to_bf16(key.first[i]); key_to[HD / 2] = to_bf16(key.second[i]);
      value_to[0] = own(VALUES, row)[d]; value_to[HD / 2] = own(VALUES, row)[d + HD / 2];
    }
  }
  if (lane == 0) all.most[warp] = most;
  block_sync();
  UNROLL for (int w = 0; w < WARPS; w++) most = most > all.most[w] ? most : all.most[w];
  const int part = threadIdx.x / HD, d = threadIdx.x % HD;
  float sum = 0.f, weights = 0.f;
  const auto add = [&](int at, u16 value) {
    const float weight = __expf(all.weight[at] - most);
    sum += weight * from_bf16(value); weights += weight;
  };
  int at = part;
  if (part < PARTS) for (; at < past; at += OLD * PARTS) {
    u16 value[OLD];
    UNROLL for (int i = 0; i < OLD; i++) value[i] = at + i * PARTS < past ? values[(i64)(at + i * PARTS) * HD + d] : 0;
    UNROLL for (int i = 0; i < OLD; i++) if (at + i * PARTS < past) add(at + i * PARTS, value[i]);
  }
  if (part < PARTS) for (at = past + part; at < seen; at += PARTS) add(at, own(VALUES, at - past)[d]);
  all.part[threadIdx.x] = sum;
  block_sync();
  float total = 0.f;
  if (part == 0) UNROLL for (int i = 0; i < PARTS; i++) total += all.part[i * HD + d];
  block_sync();
  all.part[threadIdx.x] = weights;
  block_sync();
  if (part) return;
  float whole = 0.f;
  UNROLL for (int i = 0; i < PARTS; i++) whole += all.part[i * HD + d];
  out[d] = to_bf16(total / whole);
}

extern "C" __device__ const u32 mktts_layer_bytes = S::LAYER_BYTES;
extern "C" __device__ const u32 mktts_params_bytes = sizeof(RowsParams);
extern "C" __device__ const u32 mktts_rows = ROWS;
extern "C" __device__ const u32 mktts_most_keys = MOST_KEYS;
