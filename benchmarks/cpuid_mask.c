/* Has a process see a CPU with less than this one: loaded by LD_PRELOAD, for benchmarks/held_processes.py only.

   Intel CPUs can raise a signal at each CPUID instruction (Linux: arch_prctl). The handler asks the CPU, removes what
   MASK_LEVEL excludes (0: AVX-512 and all beyond it, 1: VNNI, 2: BF16, 3: AMX, 4: nothing) and, with MASK_AMD, names
   AMD as the maker, with caches described where AMD's CPUs describe them. The instructions themselves still work. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

enum { EAX, EBX, ECX, EDX };

static int active, level, amd;

static void ask(unsigned leaf, unsigned subleaf, unsigned *r) {
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __asm__ volatile("cpuid" : "=a"(r[EAX]), "=b"(r[EBX]), "=c"(r[ECX]), "=d"(r[EDX]) : "a"(leaf), "c"(subleaf));
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
}

static void name_amd(unsigned leaf, unsigned subleaf, unsigned *r) {
    static const unsigned caches[3][4] = {
        {0x121, 0x01c0003f, 63, 0}, {0x143, 0x01c0003f, 1023, 2}, {0x163, 0x03c0003f, 32767, 1}};
    if (leaf == 0 || leaf == 0x80000000) {
        r[EAX] = leaf ? 0x80000021 : 0x10;
        r[EBX] = 0x68747541, r[EDX] = 0x69746e65, r[ECX] = 0x444d4163; /* "AuthenticAMD" */
    }
    if (leaf == 1) r[EAX] = 0x00a00f11; /* an EPYC of the third generation */
    if (leaf == 2 || leaf == 4) memset(r, 0, 4 * sizeof *r);
    if (leaf == 0x80000001) r[ECX] |= BIT(22);
    if (leaf == 0x8000001d) {
        memset(r, 0, 4 * sizeof *r);
        if (subleaf < 3) memcpy(r, caches[subleaf], sizeof caches[subleaf]);
    }
}

static void remove_beyond_level(unsigned leaf, unsigned subleaf, unsigned *r) {
    if (leaf == 7 && subleaf == 0) {
        if (level < 1) {
            r[EBX] &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
            r[ECX] &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14));
            r[EDX] &= ~(BIT(2) | BIT(3) | BIT(8));
        }
        if (level < 2) r[ECX] &= ~BIT(11);
        if (level < 4) r[EDX] &= ~(BIT(22) | BIT(23) | BIT(24) | BIT(25));
    }
    if (leaf == 7 && subleaf == 1) {
        if (level < 3) r[EAX] &= ~(BIT(4) | BIT(5));
        r[EAX] &= ~BIT(21);
        r[EDX] &= ~(BIT(4) | BIT(5) | BIT(19));
    }
    if (leaf == 0xd && subleaf == 0) r[EAX] &= level < 1 ? ~0x600e0u : level < 4 ? ~0x60000u : ~0u;
    if ((leaf == 0x1d || leaf == 0x1e) && level < 4) memset(r, 0, 4 * sizeof *r);
    if (leaf == 0x24) memset(r, 0, 4 * sizeof *r);
}

extern int __sigaction(int, const struct sigaction *, struct sigaction *);

static void on_fault(int number, siginfo_t *information, void *context) {
    (void)number, (void)information;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *instruction = (const unsigned char *)registers[REG_RIP];
    if (instruction[0] != 0x0f || instruction[1] != 0xa2) { /* a real fault: let it happen again */
        struct sigaction usual = {.sa_handler = SIG_DFL};
        __sigaction(SIGSEGV, &usual, NULL);
        return;
    }
    unsigned r[4], leaf = (unsigned)registers[REG_RAX], subleaf = (unsigned)registers[REG_RCX];
    ask(leaf, subleaf, r);
    remove_beyond_level(leaf, subleaf, r);
    if (amd) name_amd(leaf, subleaf, r);
    registers[REG_RAX] = r[EAX], registers[REG_RBX] = r[EBX], registers[REG_RCX] = r[ECX], registers[REG_RDX] = r[EDX];
    registers[REG_RIP] += 2;
}

/* Libraries install handlers of SIGSEGV in both ways; ours has to stay. */
int sigaction(int number, const struct sigaction *action, struct sigaction *old) {
    if (number != SIGSEGV || !active) return __sigaction(number, action, old);
    if (old) memset(old, 0, sizeof *old);
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    return sigaction(number, &action, &old) ? SIG_ERR : old.sa_handler;
}

__attribute__((constructor)) static void start(void) {
    const char *chosen = getenv("MASK_LEVEL");
    if (!chosen) return;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    level = atoi(chosen);
    amd = getenv("MASK_AMD") != NULL;
    __sigaction(SIGSEGV, &action, NULL);
    active = syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0) == 0;
    if (!active) _exit(125);
}
