/* What these programs need of linux/bpf.h and libbpf's headers, so that they compile without either. */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define SEC(name) __attribute__((section(name), used))

/* struct __sk_buff of the kernel's UAPI, as far as a message has its fields. */
struct __sk_buff {
	u32 len;
	u32 pkt_type;
	u32 mark;
	u32 not_here[9];
	u32 cb[5];
	u32 hash;
	u32 tc_classid;
	u32 data;
	u32 data_end;
};

/* LD_ABS: compilers turn these into the instruction. */
u64 load_byte(void *skb, u64 off) __asm__("llvm.bpf.load.byte");
u64 load_half(void *skb, u64 off) __asm__("llvm.bpf.load.half");
u64 load_word(void *skb, u64 off) __asm__("llvm.bpf.load.word");

static long (*skb_load_bytes)(const void *skb, u32 off, void *to, u32 len) = (void *)26;
