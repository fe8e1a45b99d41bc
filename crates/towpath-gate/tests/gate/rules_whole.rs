//! Complete files: printed and parsed again, they are equal.

use std::fs;
use std::path::{Path, PathBuf};

use towpath_gate::rules::Ruleset;

fn check(name: &str, text: &str) {
    let read = |text: &str| {
        Ruleset::parse(name, text).ruleset.unwrap_or_else(|errors| panic!("{}\n{text}", errors[0]))
    };
    let ruleset = read(text);
    let printed = ruleset.to_text();
    let again = read(&printed);
    for (rule, original) in again.rules().iter().zip(ruleset.rules()) {
        assert_eq!(
            format!("{rule:?}").split(" at: ").next(),
            format!("{original:?}").split(" at: ").next(),
            "{name}"
        );
    }
    assert!(again.same_as(&ruleset), "{name}: printed as\n{printed}");
    assert_eq!(again.to_text(), printed, "{name}");
}

#[test]
fn tables_sets_labels_and_pipes_round_trip() {
    check(
        "all",
        r#"
table a create type addr valtype legacy
table a add 10.0.0.0/8 7 2001:db8::/32 10.0.0.9 0.0.0.0/0
table skips create type addr valtype skipto,tag,limit
table skips add 10.0.0.0/8 :end,7,3 192.0.2.0/24 900,1,2
table i create type iface limit 5
table i add em0 1 em1 2
table n create type number valtype dscp,mark
table n add 80 ef,0x10 443 af11,0x20
table f create type flow:src-ip,proto,dst-port valtype divert,pipe
table f add 10.0.0.1,tcp,443 1,2 2001:db8::1,udp,53 3,4
table g create type flow
table g add 10.0.0.1,tcp,7,10.0.0.2,80 1
table m create type mac locked
table hops create type addr valtype ipv4,ipv6
table hops add 10.0.0.2 1.2.3.4,2001:db8::9
table locked create type mac
table locked add 02:00:00:00:00:00/24 5
table locked lock
pipe 1 config bw 10Mbit/s burst 64K
pipe 2 config bw 800bit/s
:BEGIN
add check-state :any
add call :sub tcp from any to any
add set 3 skipto :end ip from any to any // away
add 500 prob 0.3 count log logamount 5 tag 9 ip from { table(a) or not 10.0.0.0/8{} } to any
:sub
add 600 count { tcp or udp } from not 10.0.0.1,10.0.0.2 1-5,80 to any dst-port 7 { in or recv em* }
add 610 return next-rule ip from any to any
:end
add 900 allow tcp from any to me limit src-addr dst-port tablearg :web strict lifetime 50 lookup dst-port n
add 900 allow ip from table(unfilled,4) to any via table(i)
add 70000 deny ip from any to any
set disable 3 5
"#
        .replace("10.0.0.0/8{}", "10.0.0.0/24{1,5-9}")
        .as_str(),
    );
}

#[test]
fn example_files_round_trip() {
    files_come_back(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples"));
}

#[towpath_testenv::needs(shared)]
#[test]
fn real_files_round_trip() {
    files_come_back(Path::new(towpath_testenv::shared!()).join("cases/yanet"));
}

fn files_come_back(directory: PathBuf) {
    let mut files = Vec::new();
    let mut open = vec![directory];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            match path.is_dir() {
                true => open.push(path),
                false
                    if name.ends_with(".ipfw") || name.starts_with("firewall") && name.ends_with(".txt") =>
                {
                    files.push(path)
                }
                false => {}
            }
        }
    }
    assert!(files.len() >= 7, "{files:?}");
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        if Ruleset::parse("t", &text).ruleset.is_ok() {
            check(&file.display().to_string(), &text);
        }
    }
}

#[test]
fn rows_round_trip() {
    let rows: &[(&str, &str)] = include!("rows/print.in");
    let text: String = rows.iter().map(|(rule, _)| format!("add {rule}\n")).collect();
    check("rows", &text);
}
