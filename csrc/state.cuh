// The parameters of a launch, the exchange area, a block's shared memory, and a thread's context in registers.
#pragma once
#include "ptx.cuh"

// Exchange area in global memory. 32-bit words carry [tag:16 | bf16:16], 64-bit words [tag:32 | fp32:32], sums over
// groups [count:8 | fixed-point:56].
constexpr int POSITIONS = 2;                 // most positions of a pass: the predictor's first pass has two
constexpr int SUMS = 3;                      // for the talker, the predictor, and the second position of that pass
// All blocks poll the words of a sum, and additions to a cache line queue behind its reads: lines are LINE_STEP lines
// apart, and each block reads one of COPIES (H200, 0.6B frame inside a launch, ms: adjacent in one copy 1.217, four
// lines apart 1.155, in two copies 1.127, in four 1.114).
constexpr u32 LINE_ROWS = 16, LINE_STEP = 4, COPIES = 4;
DEV u32 place(u32 row) { return row / LINE_ROWS * LINE_ROWS * LINE_STEP + row % LINE_ROWS; }
struct Sums {
  u64 word[SUMS][COPIES][ceil_div(MAXH, LINE_ROWS) * LINE_ROWS * LINE_STEP];
  i64 was[SUMS][MAXH];                       // the newest sums, which group 0 subtracts later
};
struct Exchange {
  Sums h, x;                                 // added to the residual before the feed-forward, and after it
  u32 counts[4];                             // [0]: Ctx::counts at the end of the previous launch
  u64 part[NKV][SHARES][GROUP][SHARE + 2];            // talker attention partials: [group][to][from]
  u32 qkv[NKV][POSITIONS][(QPK + 2) * HD];
  u32 att[NKV][QPK * HD];
  u32 act[POSITIONS][larger(T_F, P_F)];
  u32 logits[larger(VT, VP)];
  u32 projected[P_H];
  // Text: each block's best token; a sum. Two of each, used alternately by consecutive exchanges.
  u64 offers[2][CTAS][3], sums[2][CTAS];
  u32 go;                                    // written by block 0: whether another frame is wanted
};

// The state of one utterance in a launch. `out` is the host's pinned memory: STATUS_WORDS, then FRAME_WORDS per frame.
constexpr int STATUS_WORDS = 16;
constexpr int MADE = 0;            // status word: frames made so far
constexpr int ENDED = 1;           // whether speech ended
constexpr int STOP = 2;            // written by the host: make no further frames
// 16 codes, nanoseconds of the talker with code 0, of the predictor, whether a code had no finite logit
constexpr int FRAME_WORDS = 20;
struct Stream {
  const u16* rows;                           // [frames][T_H] text rows: row i is added to the frame before frame + i
  u16* hidden;                               // [T_H] normed talker state of the newest position
  u16* sum;                                  // [T_H] embedding sum of the newest frame
  u8* kv;                                    // [T_L][NKV][GROUP][slots][2][HD] bf16
  u32* seen;                                 // [VT / 32] code-0 history bitmap
  int* out;
  int slots, position, frame, top_k0, top_k, greedy0, greedy;
  float temperature0, temperature, top_p0, top_p, penalty;
  u32 seed_lo, seed_hi, token;               // token: the newest one of a text
};

struct Params {
  const u8 *talker_tape, *talker_head_tape, *projection_tape, *predictor_tape, *predictor_head_tape;
  const u16* projection_bias;                                  // [P_H]; tape and bias only where T_H != P_H
  const u16 *talker_norms, *talker_qk, *talker_final;          // [L][2][H], [L][2][HD], [H]
  const u16 *predictor_norms, *predictor_qk, *predictor_final;
  const u16 *talker_cos, *talker_sin, *predictor_cos, *predictor_sin;  // [position][HD/2]
  const u16 *embeddings0, *embeddings;                         // [VT][T_H], [15][VP][T_H]
  const u16 *inputs0, *inputs;                                 // the same rows as input of the predictor: P_H wide
  Exchange* exchange;
  int* status;                                                 // device: error, block, thread, wait, tag
  u16 *debug_logits, *debug_hidden;                            // optional: [frames][16][VT], [frames][T_L][T_H]
  u64* trace;                                                  // with TRACE: [CTAS][TRACE]
  Stream stream;
  u64 timeout_ns;
  u32 tag;
  int frames, ends[4], suppress_from, min_frames;              // ends: ids that end a stream, -1 for unused ones
  int prefill;                                      // 1: rows holds `frames` prompt rows, for the talker only
};

constexpr int KROW = HD + 16;   // padded row of the predictor's key cache

struct __align__(128) Shared {
  u8 ring[RING][STAGE_BYTES];
  u64 full[RING], empty[RING];
  // Inputs of the next matrix, in 8 padded parts, for each position: residuals (times norm weights), and a group's part
  // of an inner vector. They are used alternately, so that no warp writes one that another still multiplies by.
  __align__(16) u16 vec0[VEC], vec1[VEC_P];
  __align__(16) u16 inner[POSITIONS][VEC_INNER];
  __align__(16) u16 key[P_L][CODES][KROW];
  __align__(16) u16 value[P_L][CODES][HD];
  __align__(16) u16 q[POSITIONS][QPK][HD], k[HD], v[HD];
  __align__(16) float partial[WARPS][QPK][HD + 4];
  float squares[POSITIONS][WARPS];
  u64 best[WARPS]; float best_logit[WARPS], mass[WARPS]; u32 above[WARPS][WARPS / 2]; u64 agreed[WARPS];
  u32 seen[SEEN_WORDS];
  u32 stop, dead, traced;
  u32 lost;                                  // the wait in which the feeder timed out; 0: none
};

// The input vector of position n of a pass; only the predictor has a second position.
DEV u16* vec_of(Shared& s, int n) { return n ? s.vec1 : s.vec0; }

struct Ctx {
  u32 block, tid, lane, warp, group, rank;   // rank: the block's place in its group
  u32 stage, phase, tag;
  u32 counts;                                // expected share counts in the words of each kind of sum: one byte each
  Shared* s;
  const Params* p;
  const Stream* u;
#ifdef TRACE
  u32 starved;
#endif
};

// With -DTRACE=n every block records when its first thread passes each point, the first n times: [point:8 | starved:16
// | clock:40], both in cycles; `starved` is the time its warp waited for weights since its last mark. Read by
// mktts/kernel/trace.py. Without TRACE a mark compiles to nothing.
#ifdef TRACE
DEV void mark(Ctx& c, u64 id) {
  const u64 starved = c.starved < 0xffffu ? c.starved : 0xffffu;
  c.starved = 0;
  if (c.tid != 0) return;
  const u32 n = c.s->traced++;
  if (n < TRACE) c.p->trace[c.block * TRACE + n] = (id << 56) | (starved << 40) | (cycles() & 0xffffffffffull);
}
#define MARK(c, id) mark(c, id)
#else
#define MARK(c, id)
#endif
