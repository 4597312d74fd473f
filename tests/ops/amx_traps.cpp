// The instructions of AMX for a processor without them: each raises SIGILL, and the handler does what it would have done.
// So the real machine code runs anywhere, operands, addresses and order of stores included. x86-64 Linux only.
#include <csignal>
#include <cstdio>
#include <ucontext.h>

#define PHYLON_AMX_EMULATED
#include "amx.h"

namespace {

long counted = 0;

[[noreturn]] void give_up(const char* what, const uint8_t* at) {
    fprintf(stderr, "%s:", what);
    for (int i = 0; i < 12; ++i) fprintf(stderr, " %02x", at[i]);
    fprintf(stderr, "\n");
    std::abort();
}

// The VEX encoding (Intel SDM volume 2, section 2.3): three bytes, opcode, ModRM, SIB, displacement.
void on_illegal(int, siginfo_t*, void* context) {
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    const uint8_t* at = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
    if (at[0] != 0xC4 || (at[1] & 31) != 2) give_up("not AMX", at);
    int high_index = ~at[1] >> 6 & 1, high_base = ~at[1] >> 5 & 1, third = ~at[2] >> 3 & 15, prefix = at[2] & 3;
    int opcode = at[3], mode = at[4] >> 6, reg = at[4] >> 3 & 7, rm = at[4] & 7;
    EmulatedTiles& tiles = emulated_tiles();
    const uint8_t* next = at + 5;
    if (mode == 3) {
        if (opcode == 0x49 && prefix == 0 && at[4] == 0xC0)
            release();
        else if (opcode == 0x49 && prefix == 3)
            tiles.zero(reg);
        else if (opcode == 0x5C && prefix == 2)
            tiles.multiply(reg, rm, third);
        else
            give_up("unknown", at);
    } else {
        int64_t address = 0, stride = 0;
        int base = rm;
        if (rm == 4) {
            uint8_t sib = *next++;
            int index = (sib >> 3 & 7) | high_index << 3;
            if (index != 4) stride = registers[order[index]] << (sib >> 6);
            base = sib & 7;
        }
        if (mode == 0 && base == 5) give_up("addressing of another kind", at);
        address = registers[order[base | high_base << 3]];
        if (mode == 1) address += int8_t(*next), next += 1;
        if (mode == 2) {
            int32_t offset;
            memcpy(&offset, next, 4);
            address += offset, next += 4;
        }
        void* memory = reinterpret_cast<void*>(address);
        if (opcode == 0x49 && prefix == 0) {
            TileConfig wanted;
            if (memcmp(memory, &wanted, sizeof wanted) != 0) give_up("another configuration", static_cast<uint8_t*>(memory));
            configure(wanted);
        } else if (opcode == 0x4B && prefix == 3) {
            tiles.load(reg, memory, stride);
        } else if (opcode == 0x4B && prefix == 2) {
            tiles.store(reg, memory, stride);
        } else {
            give_up("unknown", at);
        }
    }
    __atomic_fetch_add(&counted, 1, __ATOMIC_RELAXED);
    registers[REG_RIP] = reinterpret_cast<greg_t>(next);
}

}  // namespace

extern "C" {

void install() {
    struct sigaction action = {};
    action.sa_sigaction = on_illegal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, nullptr);
}

long instructions() { return counted; }
}
