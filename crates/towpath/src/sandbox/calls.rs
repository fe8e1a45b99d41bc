//! Groups of system calls. A group is what one purpose needs.

use super::Need;

/// A system call: its name and its number.
pub(super) type Call = (&'static str, i64);

/// System calls of one purpose.
#[derive(Debug)]
pub(super) struct Group {
    /// The name in the documentation.
    pub(super) name: &'static str,
    /// The configurations whose threads get the group.
    pub(super) need: Need,
    pub(super) calls: &'static [&'static [Call]],
}

/// Rows of calls; `libc` has the numbers of the architecture.
macro_rules! calls {
    ($($call:ident)*) => { &[$((stringify!($call), libc::$call)),*] };
}

/// Calls that `libc` has for x86-64 only: most of them exist on arm64 in their newer forms.
#[cfg(target_arch = "x86_64")]
macro_rules! old_calls {
    ($($call:ident)*) => { calls!($($call)*) };
}
#[cfg(not(target_arch = "x86_64"))]
macro_rules! old_calls {
    ($($call:ident)*) => {
        &[]
    };
}

/// Every thread: memory, waiting, time, signals, threads, and descriptors that it has.
pub(super) const BASE: Group = Group {
    name: "base",
    need: Need::Always,
    calls: &[
        calls!(
            SYS_read SYS_write SYS_readv SYS_writev SYS_close SYS_fcntl SYS_dup SYS_dup3 SYS_eventfd2 SYS_fstat SYS_lseek SYS_ioctl
            SYS_mmap SYS_munmap SYS_mremap SYS_mprotect SYS_madvise SYS_brk SYS_membarrier
            SYS_futex SYS_ppoll SYS_pselect6 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2
            SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday
            SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_sigaltstack SYS_tgkill SYS_restart_syscall
            SYS_getpid SYS_gettid SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getrandom SYS_getrusage SYS_prlimit64 SYS_sysinfo
            SYS_uname SYS_sched_yield SYS_sched_getaffinity SYS_sched_setaffinity SYS_sched_getattr SYS_sched_setattr SYS_getcpu
            SYS_clone SYS_clone3 SYS_prctl SYS_seccomp SYS_landlock_restrict_self SYS_set_robust_list SYS_rseq SYS_exit SYS_exit_group
        ),
        old_calls!(SYS_poll SYS_select SYS_epoll_wait SYS_time SYS_dup2 SYS_pipe SYS_arch_prctl),
    ],
};

/// Data on sockets that are open.
pub(super) const SOCKET_DATA: Group = Group {
    name: "socket data",
    need: Need::Always,
    calls: &[calls!(
        SYS_recvfrom SYS_recvmsg SYS_recvmmsg SYS_sendto SYS_sendmsg SYS_sendmmsg SYS_accept4 SYS_shutdown SYS_getsockopt
        SYS_setsockopt SYS_getsockname SYS_getpeername
    )],
};

/// New sockets.
pub(super) const SOCKETS: Group = Group {
    name: "sockets",
    need: Need::Always,
    calls: &[calls!(SYS_socket SYS_socketpair SYS_bind SYS_listen SYS_connect)],
};

/// Shared memory of rings.
pub(super) const SHARED_MEMORY: Group = Group {
    name: "shared memory",
    need: Need::Always,
    calls: &[calls!(SYS_memfd_create SYS_ftruncate SYS_fallocate)],
};

/// Files that are read. `openat` for reading only.
pub(super) const FILES_READ: Group = Group {
    name: "files read",
    need: Need::Always,
    calls: &[
        calls!(
            SYS_openat SYS_newfstatat SYS_statx SYS_fstatfs SYS_pread64 SYS_getdents64 SYS_readlinkat SYS_faccessat SYS_faccessat2
            SYS_getcwd SYS_fadvise64
        ),
        old_calls!(SYS_open SYS_stat SYS_lstat SYS_access SYS_readlink),
    ],
};

/// Files that are written, made and removed.
pub(super) const FILES_WRITTEN: Group = Group {
    name: "files written",
    need: Need::Always,
    calls: &[
        calls!(
            SYS_pwrite64 SYS_pwritev SYS_fsync SYS_fdatasync SYS_unlinkat SYS_renameat SYS_renameat2 SYS_mkdirat SYS_linkat SYS_fchmod
            SYS_fchmodat SYS_fchown SYS_fchownat SYS_utimensat SYS_flock SYS_umask SYS_copy_file_range
        ),
        old_calls!(SYS_fchmodat2 SYS_unlink SYS_rename SYS_mkdir SYS_rmdir SYS_chmod SYS_chown SYS_link),
    ],
};

/// Files of Unix sockets, and their locks: made, changed and removed.
pub(super) const SOCKET_FILES: Group = Group {
    name: "socket files",
    need: Need::Always,
    calls: &[
        calls!(SYS_flock SYS_fchmod SYS_fchmodat SYS_unlinkat SYS_statx SYS_newfstatat),
        old_calls!(SYS_fchmodat2 SYS_unlink SYS_chmod),
    ],
};

/// Other processes: their end and their identity.
pub(super) const PROCESSES: Group = Group {
    name: "processes",
    need: Need::Always,
    calls: &[calls!(
        SYS_kill SYS_pidfd_open SYS_pidfd_send_signal SYS_pidfd_getfd SYS_waitid SYS_wait4 SYS_getppid SYS_capget SYS_getpgid SYS_setpgid SYS_pipe2
    )],
};

/// Workers of a mux.
pub(super) const WORKERS: Group = Group { need: Need::Muxes, ..PROCESSES };

/// Socket files that are removed or replaced (inotify(7)).
pub(super) const FILE_EVENTS: Group = Group {
    name: "file events",
    need: Need::Always,
    calls: &[calls!(SYS_inotify_init1 SYS_inotify_add_watch SYS_inotify_rm_watch)],
};

/// Zero-copy sends of a mux.
pub(super) const IO_URING: Group = Group {
    name: "io_uring",
    need: Need::Muxes,
    calls: &[calls!(SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register)],
};

/// Maps and programs of AF_XDP, of exclusive ports and of flow offload.
pub(super) const BPF: Group = Group { name: "bpf", need: Need::Bpf, calls: &[calls!(SYS_bpf)] };
