// A launch of csrc/frame.cu on one CPU thread: all lanes of all blocks, warps in an order of chance.
#include <sys/mman.h>

static const Params* launched;
constexpr size_t STACK_BYTES = 96 * 1024;   // of a lane
constexpr size_t PAGE_BYTES = 4096, STATUS_BYTES = 32;

void SharedMemory::resize(size_t n) {
  const size_t room = round_up(n, PAGE_BYTES);
  u8* from = (u8*)mmap(nullptr, room + PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (from == MAP_FAILED || mprotect(from + room, PAGE_BYTES, PROT_NONE)) fail("no room for shared memory");
  end = from + room; bytes = n;
}
void SharedMemory::free() { munmap(end - round_up(bytes, PAGE_BYTES), round_up(bytes, PAGE_BYTES) + PAGE_BYTES); }

void check_exchange(const void* p, u32 width) {
  const u8 *at = (const u8*)p, *area = (const u8*)launched->exchange, *status = (const u8*)launched->status;
  const bool exchanged = at >= area && at + width <= area + sizeof(Exchange);
  const bool within = exchanged || (at >= status && at + width <= status + STATUS_BYTES);
  if (!within || (u64)at % width) fail("exchange area: out of range, or not aligned");
}
static void lane_main() { mktts_frames(*launched); now->done = true; give_way(); }

extern "C" void host_lose_copy(u64 which) { lost_copy = which; }
extern "C" u32 host_exchange_bytes() { return sizeof(Exchange); }
// Why the launch did not end; nullptr where it did.
extern "C" const char* host_launch(const Params* params, u64 seed) {
  constexpr int WIDTH = THREADS + FEED_THREADS;
  launched = params;
  std::vector<Block> blocks(CTAS);
  std::vector<Lane> lanes(CTAS * WIDTH);
  u8* stacks = (u8*)mmap(nullptr, lanes.size() * STACK_BYTES, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) fail("no room for the lanes' stacks");
  for (size_t i = 0; i < lanes.size(); i++) {
    Block& block = blocks[i / WIDTH];
    if (i % WIDTH == 0) { block.id = i / WIDTH; block.shared.resize(sizeof(Shared)); }
    Lane& lane = lanes[i];
    lane.thread = i % WIDTH; lane.block = &block;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = stacks + i * STACK_BYTES; lane.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&lane.context, lane_main, 0);
  }
  const u64 last_turn = turns + 8 * params->timeout_ns;   // far behind the kernel's own watchdog
  static char why[80]; why[0] = 0;
  for (size_t left = lanes.size(); left;) {
    if (turns > last_turn) {
      size_t i = 0; while (lanes[i].done) i++;
      const u32 block = lanes[i].block->id, thread = lanes[i].thread;
      snprintf(why, sizeof why, "block %u, thread %u never ended, and %zu more", block, thread, left - 1);
      break;
    }
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;   // Knuth's MMIX
    const size_t warp = (seed >> 33) % (lanes.size() / 32), row = 1 + (seed >> 60) % 4;
    for (size_t turn = 0; turn < row; turn++, turns++) for (size_t i = warp * 32; i < warp * 32 + 32; i++) {
      const bool done = lanes[i].done;
      take_turn(lanes[i]);
      left -= lanes[i].done != done;
    }
  }
  for (Block& block : blocks) block.shared.free();
  munmap(stacks, lanes.size() * STACK_BYTES);
  return why[0] ? why : nullptr;
}
