//! The system calls that each thread of the engine may make (seccomp(2)), and the files that it may use (landlock(7)).
//!
//! `towpath run` calls [`arm`]. When the engine has opened what it needs and has dropped its privileges, `begin` restricts the files of the
//! calling thread, and gives all threads the union of the roles. Each thread then calls `enter`, which adds the filter of its role. A
//! restriction cannot be removed, and threads inherit those of the thread that starts them. Programs would inherit them too: threads that
//! start programs themselves, in an engine without a launcher, are not restricted. A process that does not call [`arm`], such as a test,
//! is not restricted.

#[macro_use]
mod calls;
pub(crate) mod files;
pub(crate) mod program;
mod role;

pub use role::Role;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use towpath_port::driver::Capability;
use towpath_port::forbidden_call;

use crate::config::Config;
use calls::Call;
use files::{Domain, Files};

/// What happens to a thread that makes another system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A line on standard error, and the process ends by SIGSYS.
    Kill,
    /// The kernel executes the call and logs it (audit).
    Log,
    /// No filter.
    Off,
}

impl Mode {
    /// The mode of a configuration's word.
    pub fn of_word(word: &str) -> Option<Self> {
        [("kill", Self::Kill), ("log", Self::Log), ("off", Self::Off)]
            .into_iter()
            .find_map(|(own, mode)| (own == word).then_some(mode))
    }

    fn action(self) -> SeccompAction {
        match self {
            // The handler of `forbidden_call` ends the process. Without it, SIGSYS does.
            Self::Kill => SeccompAction::Trap,
            Self::Log | Self::Off => SeccompAction::Log,
        }
    }
}

/// The configurations whose threads get a group of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Always,
    Muxes,
    Bpf,
}

impl Need {
    /// The condition in the documentation.
    fn text(self) -> &'static str {
        match self {
            Self::Always => "",
            Self::Muxes => " (with a mux)",
            Self::Bpf => " (with `af_xdp`, an exclusive port or offload)",
        }
    }
}

/// What a configuration needs.
#[derive(Clone, Copy, Debug, Default)]
struct Needs {
    muxes: bool,
    bpf: bool,
    /// The engine opens ports itself: there is no launcher.
    opens_ports: bool,
    /// The engine starts programs itself.
    starts_programs: bool,
}

impl Needs {
    fn of(config: &Config, launcher: bool) -> Self {
        let programs =
            !config.muxes.is_empty() || config.queues.iter().any(|queue| queue.inspectors.wanted() > 0);
        Self {
            muxes: !config.muxes.is_empty(),
            bpf: config.offload.is_some()
                || config.ports.iter().any(|port| port.driver.capabilities().contains(&Capability::Bpf)),
            opens_ports: !launcher,
            starts_programs: !launcher && programs,
        }
    }

    fn has(&self, need: Need) -> bool {
        match need {
            Need::Always => true,
            Need::Muxes => self.muxes,
            Need::Bpf => self.bpf,
        }
    }

    /// True if threads of this role start programs, which would inherit a filter.
    fn starts_programs_in(&self, role: Role) -> bool {
        self.starts_programs
            && match role {
                Role::Supervisor | Role::Mux => true,
                // A mux on an engine thread starts its workers.
                Role::Packet => self.muxes,
                _ => false,
            }
    }
}

/// The configured mode, and the files that the rules name.
static ARMED: OnceLock<(Option<Mode>, Vec<PathBuf>)> = OnceLock::new();
static BEGUN: OnceLock<Begun> = OnceLock::new();

/// What [`begin`] has decided.
#[derive(Debug)]
struct Begun {
    needs: Needs,
    /// `None`: no filters.
    mode: Option<Mode>,
    /// `None`: every file.
    files: Option<Domain>,
}

thread_local! {
    static ENTERED: Cell<bool> = const { Cell::new(false) };
    /// The thread started before [`begin`], and does not have the restriction of the thread that called it.
    static EARLY: Cell<bool> = const { Cell::new(false) };
}

/// Lets `begin` restrict this process. `None`: in mode [`Kill`](Mode::Kill), if the kernel accepts the filters. `files` are those that the
/// rules name: a reload may read them again.
pub fn arm(mode: Option<Mode>, files: Vec<PathBuf>) {
    // A second call: the first mode stays.
    let _ = ARMED.set((mode, files));
}

/// Restricts the files of the calling thread and of those that it starts, and all threads of this process to the calls of all roles, if the
/// process is [armed](arm).
///
/// # Errors
///
/// The kernel refuses a filter that the configuration demands.
pub(crate) fn begin(config: &Config, launcher: bool) -> io::Result<()> {
    let Some((configured, read)) = ARMED.get() else { return Ok(()) };
    let configured = *configured;
    let mode = configured.unwrap_or(Mode::Kill);
    let needs = Needs::of(config, launcher);
    // Before the filters, which do not allow the calls that make a domain.
    let files = if mode == Mode::Kill { domain(&Files::of(config, read)) } else { None };
    if let Some(files) = &files
        && !needs.starts_programs
    {
        warn_of_files(files.restrict());
    }
    let result = match mode {
        Mode::Off => Ok(None),
        _ => restrict_process(mode, &needs).map(|()| Some(mode)),
    };
    let (begun, result) = match result {
        Ok(begun) => (begun, Ok(())),
        Err(error) if configured.is_some() => (None, Err(error)),
        Err(error) => {
            tracing::warn!(
                "sandbox: the threads may make every system call, because the kernel refuses seccomp filters: {error}"
            );
            (None, Ok(()))
        }
    };
    if begun.is_some() && needs.starts_programs {
        tracing::info!(
            "sandbox: threads that start programs are not restricted, because no launcher starts them"
        );
    }
    let _ = BEGUN.set(Begun { needs, mode: begun, files });
    result
}

/// Opens the places of the files. Says if the kernel cannot restrict threads to them.
fn domain(files: &Files) -> Option<Domain> {
    match files.domain() {
        Ok(Some(domain)) => return Some(domain),
        Ok(None) => tracing::warn!(
            "sandbox: the threads may use every file of the engine's user, because the kernel has no Landlock (CONFIG_SECURITY_LANDLOCK, \
             and `landlock` in lsm=)"
        ),
        Err(error) => {
            tracing::warn!("sandbox: the threads may use every file of the engine's user: Landlock: {error}");
        }
    }
    None
}

fn warn_of_files(restricted: io::Result<()>) {
    if let Err(error) = restricted {
        tracing::warn!("a thread may use every file of the engine's user: Landlock: {error}");
    }
}

/// The reason why threads cannot use the files of another configuration and of its rules, and the remedy.
pub(crate) fn refuses(config: &Config) -> Option<String> {
    let begun = BEGUN.get()?;
    let files = Files::of(config, &[]);
    let path = begun.files.as_ref()?.refuses(&files).filter(|_| !begun.needs.starts_programs)?;
    Some(format!("{}: {OUTSIDE}", path.display()))
}

/// The remedy for a file that the engine cannot use.
pub(crate) const OUTSIDE: &str = "the sandbox permits only the directories of files that the configuration named at the start: restart or \
                                  upgrade the engine";

/// Returns true if the files of the calling thread are restricted, once the process has begun.
pub(crate) fn restricts_files() -> bool {
    BEGUN.get().is_some_and(|begun| begun.files.is_some() && !begun.needs.starts_programs)
}

/// Restricts the calling thread to the calls of its role, and its files if it has not inherited that. Does nothing before [`begin`], and
/// for a thread that has a role.
pub(crate) fn enter(role: Role) {
    let Some(Begun { needs, mode, files }) = BEGUN.get() else { return EARLY.set(true) };
    if ENTERED.replace(true) || needs.starts_programs_in(role) {
        return;
    }
    if let Some(files) = files
        && (EARLY.get() || needs.starts_programs)
    {
        warn_of_files(files.restrict());
    }
    let Some(mode) = mode else { return };
    if let Err(error) = restrict_thread(role, *mode, needs) {
        tracing::warn!(
            "a thread has the system calls of all roles, not only those of `{}`: {error}",
            role.name()
        );
    }
}

/// Returns true after [`begin`].
pub(crate) fn has_begun() -> bool {
    BEGUN.get().is_some()
}

/// As [`enter`] for a thread that may have started before [`begin`] and does not wait for it. Returns false before.
pub(crate) fn follow(role: Role) -> bool {
    let begun = has_begun();
    if begun {
        EARLY.set(true);
        enter(role);
    }
    begun
}

/// As [`enter`], but a thread that starts before [`begin`] waits for it.
pub(crate) fn enter_when_begun(role: Role) {
    if ARMED.get().is_some() {
        EARLY.set(BEGUN.get().is_none());
        BEGUN.wait();
        enter(role);
    }
}

fn restrict_process(mode: Mode, needs: &Needs) -> io::Result<()> {
    if mode == Mode::Kill {
        forbidden_call::report()?;
    }
    if needs.starts_programs {
        // Its programs would inherit the filter. This call fails as the installation of a filter would.
        return restrictable();
    }
    let all = Role::ALL.iter().flat_map(|role| role.calls(needs));
    let listed = all.map(|(_, number)| (number, conditions(number, true))).collect();
    install(listed, mode.action(), SeccompAction::Allow, true)?;
    install(BTreeMap::from([fallback()]), SeccompAction::Allow, no_call(), true)
}

/// Tries a filter that allows all calls, in a thread that ends.
fn restrictable() -> io::Result<()> {
    let attempt = || install(BTreeMap::from([fallback()]), SeccompAction::Allow, no_call(), false);
    std::thread::scope(|scope| scope.spawn(attempt).join()).unwrap_or_else(|_| Err(io::Error::other("panic")))
}

fn restrict_thread(role: Role, mode: Mode, needs: &Needs) -> io::Result<()> {
    let calls = role.calls(needs);
    let opens = calls.iter().any(|(_, number)| *number == libc::SYS_openat);
    let writes = role.writes_files(needs);
    let mut listed: BTreeMap<_, _> =
        calls.into_iter().map(|(_, number)| (number, conditions(number, writes))).collect();
    if !opens {
        // The allocator of the C library looks at /proc/sys/vm/overcommit_memory, and goes on without it.
        listed.insert(libc::SYS_openat, Vec::new());
        let refused = BTreeMap::from([(libc::SYS_openat, Vec::new())]);
        install(refused, SeccompAction::Allow, SeccompAction::Errno(libc::EACCES as u32), false)?;
    }
    if needs.starts_programs {
        install(BTreeMap::from([fallback()]), SeccompAction::Allow, no_call(), false)?;
    }
    install(listed, mode.action(), SeccompAction::Allow, false)
}

/// clone3(2) has its flags in memory, where a filter cannot read them. The C library then calls clone(2).
fn fallback() -> (i64, Vec<SeccompRule>) {
    (libc::SYS_clone3, Vec::new())
}

fn no_call() -> SeccompAction {
    SeccompAction::Errno(libc::ENOSYS as u32)
}

/// The arguments with which a call is allowed; empty: all. `writes`: openat(2) may write.
fn conditions(number: i64, writes: bool) -> Vec<SeccompRule> {
    let rule = |argument, operator, value| {
        let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
            .expect("a call has six arguments");
        SeccompRule::new(vec![condition]).expect("one condition")
    };
    match number {
        // Threads, but no namespaces.
        libc::SYS_clone => vec![rule(0, SeccompCmpOp::MaskedEq(NAMESPACES), 0)],
        libc::SYS_prctl => PRCTL.iter().map(|option| rule(0, SeccompCmpOp::Eq, *option as u64)).collect(),
        libc::SYS_openat if !writes => vec![rule(2, SeccompCmpOp::MaskedEq(WRITING), 0)],
        #[cfg(target_arch = "x86_64")]
        libc::SYS_open if !writes => vec![rule(1, SeccompCmpOp::MaskedEq(WRITING), 0)],
        _ => Vec::new(),
    }
}

/// Flags of openat(2) that are zero if a file is only read.
const WRITING: u64 = (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC) as u64;

/// CLONE_NEW* of clone(2).
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// The options of prctl(2) that threads use: names, names of memory, capabilities that they have, and further filters.
const PRCTL: &[i32] = &[
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_SET_VMA,
    libc::PR_SET_TIMERSLACK,
    libc::PR_GET_TIMERSLACK,
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_CAPBSET_READ,
    libc::PR_GET_DUMPABLE,
    PR_GET_AUXV,
];

/// linux/prctl.h, since Linux 6.4: the values that the kernel passed to the program.
const PR_GET_AUXV: i32 = 0x4155_5856;

/// Compiles a filter and installs it in this thread, or in all threads of the process.
fn install(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    other: SeccompAction,
    listed: SeccompAction,
    all_threads: bool,
) -> io::Result<()> {
    let arch = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, other, listed, arch).map_err(io::Error::other)?;
    let program: BpfProgram = filter.try_into().map_err(io::Error::other)?;
    match all_threads {
        true => seccompiler::apply_filter_all_threads(&program),
        false => seccompiler::apply_filter(&program),
    }
    .map_err(io::Error::other)
}

/// The system calls of all roles in Markdown: a list of roles and one of groups.
pub fn markdown() -> String {
    let all = Needs { muxes: true, bpf: true, ..Needs::default() };
    let mut groups: Vec<&calls::Group> = Vec::new();
    let mut roles = "Roles and their groups:\n\n".to_owned();
    for role in Role::ALL {
        let mut names = Vec::new();
        for group in role.groups_with(&all) {
            names.push(format!("{}{}", group.name, group.need.text()));
            if !groups.iter().any(|own| own.name == group.name) {
                groups.push(group);
            }
        }
        writeln!(roles, "- `{}`: {}", role.name(), names.join(", ")).expect("a String grows");
    }
    let mut text = roles + "\nGroups and their system calls:\n\n";
    for group in groups {
        let name = |(name, _): &Call| format!("`{}`", name.trim_start_matches("SYS_"));
        let mut names: Vec<_> = group.calls.iter().copied().flatten().map(name).collect();
        names.sort_unstable();
        writeln!(text, "- *{}*: {}", group.name, names.join(" ")).expect("a String grows");
    }
    text
}

/// The system calls that a program of the engine may not make, in Markdown.
pub fn refused_markdown() -> String {
    program::markdown()
}

#[cfg(test)]
mod tests;
