//! States what a test needs of the machine, so that a test that cannot run is reported as ignored and not as passed.
//!
//! ```text
//! #[towpath_testenv::needs(netns, "ethtool")]
//! #[test]
//! fn offloads_are_switched() { /* ... */ }
//! ```
//!
//! [`needs`] looks at the machine when it is expanded, because libtest has no way to ignore a test at run time. If
//! something is missing it adds `#[ignore = "needs ..."]`. With `CI=true` it adds nothing, and the test fails at the missing
//! resource; `OPTIONAL` lists the exceptions. `build.rs` lists the changes of the machine after which Cargo expands again.
//! A test never passes because of a stale answer: it does not check for its resources again, and fails without them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use proc_macro::{TokenStream, TokenTree};

/// Needs that are ignored with `CI=true` too: the captures are not part of the repository, and no package adds kTLS, Landlock or connection
/// tracking data of NFQUEUE to a kernel.
const OPTIONAL: [&str; 4] = ["shared", "ktls", "queue_ct", "landlock"];

/// Ignores a test on a machine that lacks one of the listed needs. It stands before `#[test]`.
///
/// A string is a program in `PATH`, or `python:MODULE`: a module in the virtual environment that `.ci/run programs` makes
/// ([`clients!`]). The words are:
///
/// | word | need |
/// |---|---|
/// | `root` | user id 0 |
/// | `netns` | new network namespaces, and the program `ip` |
/// | `userns` | new user namespaces without privilege |
/// | `tun` | `/dev/net/tun` |
/// | `xdp` | AF_XDP sockets |
/// | `tcx` | tcx links (Linux 6.6) and the privilege to attach them |
/// | `bpffs` | a BPF file system at `/sys/fs/bpf` |
/// | `cgroup2` | a cgroup (v2) file system |
/// | `nfqueue` | `iptables` and `ip6tables` with the target NFQUEUE |
/// | `netfilter_queue` | libnetfilter_queue and libmnl with their headers |
/// | `queue_ct` | a kernel that gives NFQUEUE connection tracking data (CONFIG_NETFILTER_NETLINK_GLUE_CT) |
/// | `ipv6` | a kernel with IPv6 |
/// | `mptcp` | a kernel with MPTCP |
/// | `ktls` | a kernel with kTLS |
/// | `landlock` | a kernel with Landlock, as `python3` finds it |
/// | `files` | a limit of 11,000 open files or more |
/// | `somaxconn` | `net.core.somaxconn` of 400 or more |
/// | `hugepages` | a writable `/proc/sys/vm/nr_hugepages` |
/// | `hugetlb` | a kernel with huge pages of 2 MiB for memfds |
/// | `thp` | transparent huge pages |
/// | `clang` | a clang |
/// | `python` | a `python3` of version 3.11 or later |
/// | `libnetfilter_queue` | a C compiler, and the headers of libnetfilter_queue, libnfnetlink and libmnl in `/usr/include` |
/// | `thrift` | `/usr/bin/python3` with the package `thrift` |
/// | `shared` | the shared captures: `$TOWPATH_SHARED`, or `shared` next to the checkout |
#[proc_macro_attribute]
pub fn needs(what: TokenStream, test: TokenStream) -> TokenStream {
    if !test.to_string().replace(' ', "").contains("#[test]") {
        return "compile_error!(\"#[needs] stands before #[test]\");".parse().expect("tokens");
    }
    let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    let mut missing = Vec::new();
    for token in what {
        let need = match token {
            TokenTree::Ident(word) => word.to_string(),
            TokenTree::Literal(program) => program.to_string(),
            _ => continue,
        };
        match has(&need) {
            None => {
                return format!("compile_error!({:?});", format!("unknown need: {need}"))
                    .parse()
                    .expect("tokens");
            }
            Some(false) if !in_ci || OPTIONAL.contains(&&*need) => missing.push(need.replace('"', "")),
            Some(_) => {}
        }
    }
    if missing.is_empty() {
        return test;
    }
    let ignore = format!("#[ignore = {:?}]", format!("needs {}", missing.join(", ")));
    let mut ignored: TokenStream = ignore.parse().expect("tokens");
    ignored.extend(test);
    ignored
}

/// Expands to the path of the shared material, a `&'static str`: `$TOWPATH_SHARED`, or `shared` next to the checkout.
#[proc_macro]
pub fn shared(_: TokenStream) -> TokenStream {
    format!("{:?}", shared_path()).parse().expect("a literal")
}

/// Expands to the path of the virtual environment with client libraries for tests, a `&'static str`: `clients` in the target directory.
#[proc_macro]
pub fn clients(_: TokenStream) -> TokenStream {
    format!("{:?}", clients_path()).parse().expect("a literal")
}

/// Whether the machine has `need`; `None` if the word is unknown.
fn has(need: &str) -> Option<bool> {
    let lists = |file: &str, word: &str| {
        std::fs::read_to_string(file).is_ok_and(|text| text.split_whitespace().any(|found| found == word))
    };
    Some(match need {
        "root" => effective_uid() == Some(0),
        "netns" => runs("unshare -n ip -V"),
        "userns" => runs("unshare -Urn true"),
        "tun" => Path::new("/dev/net/tun").exists(),
        "xdp" => lists("/proc/net/protocols", "XDP"),
        "tcx" => effective_uid() == Some(0) && release() >= Some((6, 6)),
        "bpffs" => lists("/proc/self/mounts", "bpf"),
        "cgroup2" => lists("/proc/self/mounts", "cgroup2"),
        "nfqueue" => ["iptables", "ip6tables"].iter().all(|program| {
            let rule = "-A OUTPUT -j NFQUEUE --queue-num 1";
            runs(&format!("unshare -n {program}-legacy {rule}"))
                || runs(&format!("unshare -n {program} {rule}"))
        }),
        "netfilter_queue" => ["libnetfilter_queue/libnetfilter_queue.h", "libmnl/libmnl.h"]
            .iter()
            .all(|header| Path::new("/usr/include").join(header).exists()),
        "queue_ct" => {
            let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
            let file = format!("/boot/config-{}", release.trim());
            ["/proc/config.gz", &file]
                .iter()
                .any(|file| runs(&format!("zgrep -qs ^CONFIG_NETFILTER_NETLINK_GLUE_CT=y {file}")))
        }
        "ipv6" => Path::new("/proc/net/if_inet6").exists(),
        "mptcp" => lists("/proc/net/protocols", "MPTCP"),
        "landlock" => {
            // landlock_create_ruleset(NULL, 0, LANDLOCK_CREATE_RULESET_VERSION)
            in_python(
                "python3",
                "import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall(444, None, 0, 1) < 1)",
            )
        }
        "ktls" => lists("/proc/sys/net/ipv4/tcp_available_ulp", "tls"),
        "files" => std::fs::read_to_string("/proc/self/limits").is_ok_and(|limits| {
            let line =
                limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap_or_default();
            let most = line.split_whitespace().nth(1).unwrap_or_default();
            most == "unlimited" || most.parse::<u64>().is_ok_and(|most| most >= 11_000)
        }),
        "somaxconn" => std::fs::read_to_string("/proc/sys/net/core/somaxconn")
            .is_ok_and(|most| most.trim().parse::<u32>().is_ok_and(|most| most >= 400)),
        "hugepages" => std::fs::OpenOptions::new().write(true).open("/proc/sys/vm/nr_hugepages").is_ok(),
        "hugetlb" => Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").exists(),
        "thp" => Path::new("/sys/kernel/mm/transparent_hugepage").exists(),
        "clang" => ["clang", "clang-19", "clang-14"].iter().any(|clang| runs(&format!("{clang} --version"))),
        "python" => in_python("python3", "import sys; sys.exit(sys.version_info < (3, 11))"),
        "libnetfilter_queue" => {
            // Debian's headers, and a compiler.
            let headers =
                ["libnetfilter_queue/libnetfilter_queue.h", "libnfnetlink/libnfnetlink.h", "libmnl/libmnl.h"];
            headers.iter().all(|header| Path::new("/usr/include").join(header).is_file())
                && runs("cc --version")
        }
        "thrift" => in_python("/usr/bin/python3", "import thrift"),
        "shared" => shared_path().join("captures").is_dir(),
        program => {
            let program = program.strip_prefix('"')?.strip_suffix('"')?;
            if let Some(module) = program.strip_prefix("python:") {
                return Some(has_module(module));
            }
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
        }
    })
}

/// The version of the kernel.
fn release() -> Option<(u32, u32)> {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    let mut numbers = text.split(['.', '-']).map(|part| part.trim().parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

fn shared_path() -> PathBuf {
    std::env::var_os("TOWPATH_SHARED").map_or_else(
        || {
            let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default();
            Path::new(&package).join("../../../shared")
        },
        PathBuf::from,
    )
}

/// The directory of `.ci/run programs`, whose working directory is the workspace.
fn clients_path() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default();
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    Path::new(&package).join("../..").join(target).join("clients")
}

/// Whether the virtual environment has a Python module: `lib/pythonX.Y/site-packages/MODULE`.
fn has_module(module: &str) -> bool {
    let versions = std::fs::read_dir(clients_path().join("lib")).into_iter().flatten().flatten();
    versions.into_iter().any(|version| version.path().join("site-packages").join(module).is_dir())
}

/// The second number of `Uid:` (proc_pid_status(5)).
fn effective_uid() -> Option<u32> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(1)?.parse().ok()
}

fn in_python(python: &str, script: &str) -> bool {
    succeeds(Command::new(python).args(["-c", script]))
}

fn runs(command: &str) -> bool {
    let mut words = command.split(' ');
    succeeds(Command::new(words.next().unwrap_or_default()).args(words))
}

fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
