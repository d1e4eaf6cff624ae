// What a launch gets from the host, what a block keeps in shared memory, and what a thread keeps in registers.
#pragma once
#include "ptx.cuh"

// Exchange area in global memory. 32-bit words carry [tag:16 | bf16:16], 64-bit words [tag:32 | fp32:32], sums over
// groups [count:8 | fixed-point:56].
constexpr int POSITIONS = 2;                 // that one pass can take: the predictor's first pass takes two
constexpr int SUMS = 3;                      // of the talker, of the predictor, of the second position in such a pass
// All blocks poll the words of a sum, and who adds to a line waits behind those who read it: lines lie LINE_STEP lines
// apart, and each block reads one of COPIES (H200, 0.6B frame inside a launch, ms: side by side in one copy 1.217, four
// lines apart 1.155, in two copies 1.127, in four 1.114).
constexpr u32 LINE_ROWS = 16, LINE_STEP = 4, COPIES = 4;
DEV u32 place(u32 row) { return row / LINE_ROWS * LINE_ROWS * LINE_STEP + row % LINE_ROWS; }
struct Sums {
  u64 word[SUMS][COPIES][ceil_div(MAXH, LINE_ROWS) * LINE_ROWS * LINE_STEP];
  i64 was[SUMS][MAXH];                       // the newest sums, as group 0 takes them back
};
struct Exchange {
  Sums h, x;                                 // what the residual gets before the feed-forward, and after it
  u32 counts[4];                             // [0]: as Ctx has it, after the launch before this one
  u64 part[NKV][SHARES][GROUP][SHARE + 2];            // talker attention partials: [group][to][from]
  u32 qkv[NKV][POSITIONS][(QPK + 2) * HD];
  u32 att[NKV][QPK * HD];
  u32 act[POSITIONS][larger(T_F, P_F)];
  u32 logits[larger(VT, VP)];
  u32 projected[P_H];
  // Text: each block's best token; any sum. Two of each, as neighbours in time alternate.
  u64 offers[2][CTAS][3], sums[2][CTAS];
  u32 go;                                    // block 0's word on whether another frame is wanted
};

// One utterance as a launch takes it. `out` is the host's pinned memory: STATUS_WORDS, then FRAME_WORDS a frame.
constexpr int STATUS_WORDS = 16;
constexpr int MADE = 0;            // status word: frames made so far
constexpr int ENDED = 1;           // whether speech ended
constexpr int STOP = 2;            // written by the host: make no further frame
// 16 codes, nanoseconds of the talker with code 0, of the predictor, whether a code is no number
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
  const u16 *inputs0, *inputs;                                 // the same rows as the predictor takes them: P_H wide
  Exchange* exchange;
  int* status;                                                 // device: error, block, thread, wait, tag
  u16 *debug_logits, *debug_hidden;                            // optional: [frames][16][VT], [frames][T_L][T_H]
  u64* trace;                                                  // with TRACE: [CTAS][TRACE]
  Stream stream;
  u64 timeout_ns;
  u32 tag;
  int frames, ends[4], suppress_from, min_frames;              // ends: ids that end a stream, -1 where there are fewer
  int prefill;                                      // 1: rows holds `frames` prompt rows, for the talker alone
};

constexpr int KROW = HD + 16;   // padded row of the predictor's key cache

struct __align__(128) Shared {
  u8 ring[RING][STAGE_BYTES];
  u64 full[RING], empty[RING];
  // Inputs of the next matrix, in 8 padded parts, for each position: whole residuals (weighed), and a group's share of
  // an inner vector. They take turns, so that no warp writes the one while another still multiplies by it.
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
  u32 lost;                                  // what the feeder waited for in vain, 0: nothing
};

// Of position n of a pass: only the predictor takes a second one.
DEV u16* vec_of(Shared& s, int n) { return n ? s.vec1 : s.vec0; }

struct Ctx {
  u32 block, tid, lane, warp, group, rank;   // rank: the block's place in its group
  u32 stage, phase, tag;
  u32 counts;                                // of shares in the words of each kind of sum: a byte each, as they have it
  Shared* s;
  const Params* p;
  const Stream* u;
#ifdef TRACE
  u32 starved;
#endif
};

// With -DTRACE=n every block notes when its first thread passed each point, the first n times: [point:8 | starved:16 |
// clock:40], both in cycles; `starved` is how long its warp waited for weights since its last mark. Read by
// mktts/kernel/trace.py. Without it a mark is nothing at all.
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
