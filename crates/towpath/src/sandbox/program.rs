//! What a program that the engine starts may not do: system calls that no inspector and no worker needs, and files outside of its
//! paths. It is applied by the process itself before it executes the program.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreated,
    RulesetCreatedAttr, make_bitflags,
};
use seccompiler::{SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

use super::calls::Call;
use super::{NAMESPACES, fallback, files, install, no_call};

/// The latest version of Landlock whose rights are used.
const LATEST: ABI = ABI::V5;

/// Groups of refused calls, with the name in the documentation.
const REFUSED: &[(&str, &[Call])] = &[
    (
        "other processes",
        calls!(SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_kcmp SYS_pidfd_getfd),
    ),
    (
        "the kernel",
        calls!(
            SYS_bpf SYS_perf_event_open SYS_userfaultfd SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register SYS_init_module
            SYS_finit_module SYS_delete_module SYS_kexec_load SYS_reboot SYS_syslog
        ),
    ),
    ("keys", calls!(SYS_add_key SYS_request_key SYS_keyctl)),
    (
        "file systems",
        calls!(
            SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_open_tree SYS_move_mount SYS_fsopen SYS_fsconfig SYS_fsmount
            SYS_fspick SYS_mount_setattr SYS_swapon SYS_swapoff SYS_quotactl SYS_acct SYS_open_by_handle_at SYS_fanotify_init
        ),
    ),
    ("namespaces", calls!(SYS_unshare SYS_setns)),
    (
        "the machine",
        calls!(
            SYS_sethostname SYS_setdomainname SYS_settimeofday SYS_clock_settime SYS_clock_adjtime SYS_adjtimex SYS_vhangup
        ),
    ),
    ("x86", old_calls!(SYS_kexec_file_load SYS_iopl SYS_ioperm SYS_modify_ldt)),
];

/// The x32 interface of x86-64, which has the same numbers with this bit, and further numbers for calls whose arguments differ:
/// ptrace, kexec_load, process_vm_readv and process_vm_writev (arch/x86/entry/syscalls/syscall_64.tbl).
const X32: i64 = 0x4000_0000;
const X32_OWN: [i64; 4] = [521, 528, 539, 540];

/// Refuses the calls to this thread with EPERM, and to the programs that it executes.
pub(crate) fn refuse_calls() -> io::Result<()> {
    let listed = REFUSED.iter().flat_map(|(_, calls)| calls.iter()).map(|(_, number)| *number);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for number in listed {
        rules.insert(number, Vec::new());
        if cfg!(target_arch = "x86_64") {
            rules.insert(number | X32, Vec::new());
        }
    }
    let namespaces = namespaces();
    rules.insert(libc::SYS_clone, namespaces.clone());
    if cfg!(target_arch = "x86_64") {
        rules.insert(libc::SYS_clone | X32, namespaces);
        rules.extend(X32_OWN.map(|number| (number | X32, Vec::new())));
    }
    install(rules, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32), false)?;
    let mut other = BTreeMap::from([fallback()]);
    if cfg!(target_arch = "x86_64") {
        other.insert(libc::SYS_clone3 | X32, Vec::new());
    }
    install(other, SeccompAction::Allow, no_call(), false)
}

/// clone(2) with one of the flags of namespaces.
fn namespaces() -> Vec<SeccompRule> {
    let bits = (0..64).map(|bit| 1u64 << bit).filter(|bit| NAMESPACES & bit != 0);
    let rule = |bit| {
        let condition = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(bit), bit)
            .expect("a call has six arguments");
        SeccompRule::new(vec![condition]).expect("one condition")
    };
    bits.map(rule).collect()
}

/// The refused system calls in Markdown.
pub(super) fn markdown() -> String {
    let row = |(group, calls): &(&str, &[Call])| {
        let mut names: Vec<_> =
            calls.iter().map(|(name, _)| format!("`{}`", name.trim_start_matches("SYS_"))).collect();
        names.sort_unstable();
        format!("- *{group}*: {}\n", names.join(" "))
    };
    REFUSED.iter().map(row).collect()
}

/// What every program reads and executes: programs and libraries of the system.
const SYSTEM: &[&str] = &[
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/alternatives",
    "/dev/random",
    "/dev/urandom",
];
/// Devices without state, which every program may write.
const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/full"];

/// The paths of a program, opened.
#[derive(Debug)]
pub(crate) struct Paths {
    ruleset: RulesetCreated,
}

impl Paths {
    /// `read`: what the program may read; `None`: everything. `write`: what it may read and write. It may execute the files `programs` and
    /// what it may read.
    pub(crate) fn open(
        read: Option<&[PathBuf]>,
        write: &[PathBuf],
        programs: &[PathBuf],
    ) -> io::Result<Self> {
        if files::abi().is_none() {
            let text = "the kernel has no Landlock, which `read` and `write` need: boot with landlock in lsm=, or remove them";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let reading = make_bitflags!(AccessFs::{Execute | ReadFile | ReadDir});
        let devices = make_bitflags!(AccessFs::{MakeChar | MakeBlock});
        let handled = match read {
            Some(_) => AccessFs::from_all(LATEST),
            None => AccessFs::from_write(LATEST),
        };
        let mut ruleset =
            Ruleset::default().handle_access(handled).and_then(Ruleset::create).map_err(io::Error::other)?;
        let mut permit = |path: &Path, rights: BitFlags<AccessFs>, must_exist: bool| -> io::Result<()> {
            let opened = match PathFd::new(path) {
                Ok(opened) => opened,
                Err(error) if must_exist => return Err(io::Error::other(error)),
                Err(_) => return Ok(()),
            };
            let rights = rights & handled;
            if rights.is_empty() {
                return Ok(());
            }
            let rule = PathBeneath::new(opened, rights);
            (&mut ruleset).add_rule(rule).map(drop).map_err(io::Error::other)
        };
        for path in SYSTEM.iter().map(Path::new).chain(programs.iter().map(PathBuf::as_path)) {
            permit(path, reading, false)?;
        }
        for path in DEVICES {
            permit(Path::new(path), make_bitflags!(AccessFs::{ReadFile | WriteFile}), false)?;
        }
        for path in read.unwrap_or_default() {
            permit(path, reading, true)?;
        }
        for path in write {
            permit(path, AccessFs::from_all(LATEST) & !devices, true)?;
        }
        Ok(Self { ruleset })
    }

    /// Restricts this thread to the paths, and the programs that it executes.
    pub(crate) fn restrict(self) -> io::Result<()> {
        self.ruleset.restrict_self().map(drop).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;
    use std::os::fd::AsFd;

    use super::*;

    fn in_a_thread(run: impl FnOnce() + Send) {
        std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
    }

    #[test]
    fn refused_calls_fail() {
        in_a_thread(|| {
            rustix::thread::set_no_new_privs(true).unwrap();
            // Before: an error of its arguments, or none.
            let join = || {
                rustix::thread::move_into_link_name_space(fs::File::open("/dev/null").unwrap().as_fd(), None)
            };
            assert_eq!(join(), Err(rustix::io::Errno::INVAL));
            refuse_calls().unwrap();
            assert_eq!(join(), Err(rustix::io::Errno::PERM));
            // Threads can be started: clone(2) without namespaces, in place of clone3(2).
            std::thread::spawn(|| fs::read("/proc/self/status").unwrap()).join().unwrap();
        });
    }

    #[towpath_testenv::needs(landlock)]
    #[test]
    fn paths_are_read_or_written() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["read", "write", "other"] {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("file"), "text").unwrap();
        }
        let reads = |name: &str| match fs::read(at(name).join("file")) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::PermissionDenied);
                false
            }
        };
        let writes = |name: &str| fs::write(at(name).join("new"), "x").is_ok();
        // Rows: keys, then reads and writes of the three directories.
        let (read, write) = (vec![at("read")], vec![at("write")]);
        type Row<'a> = (Option<&'a [PathBuf]>, &'a [PathBuf], [bool; 3], [bool; 3]);
        let rows: [Row<'_>; 3] = [
            (None, &write, [true; 3], [false, true, false]),
            (Some(&read), &[], [true, false, false], [false; 3]),
            (Some(&read), &write, [true, true, false], [false, true, false]),
        ];
        for (read, write, may_read, may_write) in rows {
            in_a_thread(|| {
                Paths::open(read, write, &[]).unwrap().restrict().unwrap();
                let names = ["read", "write", "other"];
                assert_eq!(names.map(reads), may_read, "{read:?} {write:?}");
                assert_eq!(names.map(writes), may_write, "{read:?} {write:?}");
                fs::write("/dev/null", "x").unwrap();
                assert!(fs::read_dir("/usr").is_ok());
            });
        }
        let missing = Paths::open(Some(&[at("missing")]), &[], &[]).unwrap_err().to_string();
        assert!(missing.contains("missing"), "{missing}");
    }
}
