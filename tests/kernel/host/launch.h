// A launch of csrc/frame.cu on one CPU thread: all lanes of all blocks, warps in an order of chance.
#include <sys/mman.h>

static ucontext_t scheduler;
static const Params* launched;
constexpr size_t STACK_BYTES = 96 * 1024;   // of a lane
constexpr size_t PAGE_BYTES = 4096;

void SharedMemory::resize(size_t n) {
  const size_t room = round_up(n, PAGE_BYTES);
  u8* from = (u8*)mmap(nullptr, room + PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (from == MAP_FAILED || mprotect(from + room, PAGE_BYTES, PROT_NONE)) fail("no room for shared memory");
  end = from + room; bytes = n;
}
void SharedMemory::free() { munmap(end - round_up(bytes, PAGE_BYTES), round_up(bytes, PAGE_BYTES) + PAGE_BYTES); }

void give_way() { swapcontext(&now->context, &scheduler); }
void check_exchange(const void* p, u32 width) {
  const u8 *at = (const u8*)p, *area = (const u8*)launched->exchange;
  if (at < area || at + width > area + sizeof(Exchange) || (u64)at % width)
    fail("exchange area: out of range, or not aligned");
}
static void lane_main() { mktts_frames(*launched); now->done = true; give_way(); }

extern "C" u32 host_exchange_bytes() { return sizeof(Exchange); }
extern "C" void host_launch(const Params* params, u64 seed) {
  constexpr int WIDTH = THREADS + FEED_THREADS;
  launched = params;
  std::vector<Block> blocks(CTAS);
  std::vector<Lane> lanes(CTAS * WIDTH);
  u8* stacks = (u8*)mmap(nullptr, lanes.size() * STACK_BYTES, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) fail("no room for the lanes' stacks");
  for (size_t i = 0; i < lanes.size(); i++) {
    Block& block = blocks[i / WIDTH];
    block.id = i / WIDTH; block.shared.resize(sizeof(Shared));
    Lane& lane = lanes[i];
    lane.thread = i % WIDTH; lane.block = &block; lane.done = false;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = stacks + i * STACK_BYTES; lane.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&lane.context, lane_main, 0);
  }
  for (size_t left = lanes.size(); left;) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;   // Knuth's MMIX
    const size_t warp = (seed >> 33) % (lanes.size() / 32), turns = 1 + (seed >> 60) % 4;
    for (size_t turn = 0; turn < turns; turn++) for (size_t i = warp * 32; i < warp * 32 + 32; i++) {
      if (lanes[i].done) continue;
      now = &lanes[i];
      swapcontext(&scheduler, &now->context);
      left -= now->done;
    }
  }
  for (Block& block : blocks) block.shared.free();
  munmap(stacks, lanes.size() * STACK_BYTES);
}
