//! Client programs and libraries of other projects, tested with `towpath mux` and worker processes in Python.
//!
//! `.ci/run programs` installs the clients. A test checks the content, the order and the number of the answers; [`front::Front::finish`]
//! checks that `towpath mux` reports no violation, no unsent message and no restart.

mod front;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use front::Front;

#[towpath_testenv::needs(python, "python:nats")]
#[test]
fn nats_py_publishes_and_subscribes() {
    let front = Front::start("nats", "", "--framing nats --workers 1");
    front.python("nats");
    let (connections, messages) = front.finish();
    assert_eq!(connections, 2);
    assert!(messages > 1200, "{messages}");
}

#[towpath_testenv::needs(python, "mariadb")]
#[test]
fn mariadb_is_greeted_and_asks() {
    let front = Front::start("mysql", "", "--framing mysql-packet --workers 3 --message-max 33554432");
    let mariadb =
        ["mariadb", "--no-defaults", "-h127.0.0.1", "-PPORT", "-uguest", "-psecret", "-NB", "--skip-ssl"];
    let ask = |query: &str| front.run(&[&mariadb[..], &["-e", query]].concat());
    assert_eq!(ask("select 'one'; select 'two'"), "one\ntwo\n");
    let rows: String = (0..1000).map(|row| format!("{row}\n")).collect();
    assert_eq!(ask("select 1000 rows"), rows);
    // A worker keeps the session of a connection; another connection has its own.
    for _ in 0..4 {
        assert_eq!(ask("select count; select count; select count"), "1\n2\n3\n");
    }
    let script: String = (0..500).map(|number| format!("select 'number {number}';\n")).collect();
    let answers: String = (0..500).map(|number| format!("number {number}\n")).collect();
    assert_eq!(front.run_with(script.as_bytes(), &mariadb), answers);
    // A query of 20 MB takes two packets of the protocol, which have at most 16 MiB.
    let long = format!("select length {};\n", "x".repeat(20_000_000));
    let size = format!("{}\n", long.len() - 2);
    assert_eq!(
        front.run_with(long.as_bytes(), &[&mariadb[..], &["--max-allowed-packet=64M"]].concat()),
        size
    );
    // The connection survives an error. `-f` continues after it.
    let script = "select count;\nfail;\nselect count;\n";
    let failed = front.fed(script.as_bytes(), &[&mariadb[..], &["-f"]].concat());
    assert_eq!(String::from_utf8_lossy(&failed.stdout), "1\n2\n");
    let errors = String::from_utf8_lossy(&failed.stderr);
    assert!(errors.ends_with("\nERROR 1064 (42000) at line 2: a reason\n"), "{errors}");
    let (connections, messages) = front.finish();
    assert_eq!(connections, 9);
    // Each connection sends a handshake response and a QUIT.
    assert_eq!(messages, 9 * 2 + 2 + 1 + 4 * 3 + 500 + 1 + 3);
}

#[towpath_testenv::needs(python, "pgbench")]
#[test]
fn pgbench_checks_sums() {
    let front = Front::start("postgres", "", "--framing postgres-frontend --workers 3");
    // A wrong answer makes the script fail: the server has no such query.
    let script = b"\\set a random(1, 1000000)\n\\set b random(1, 1000000)\nselect :a + :b as sum \\gset\n\
        \\if :sum <> :a + :b\nselect wrong;\n\\endif\n";
    for mode in ["simple", "extended", "prepared"] {
        let words = ["pgbench", "-h", "127.0.0.1", "-p", "PORT", "-U", "guest", "-n", "-f", "/dev/stdin"];
        let words = [&words[..], &["-c", "4", "-j", "1", "-t", "100", "-M", mode, "guest"]].concat();
        let output = front.fed(script, &words);
        let text =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{mode}: {text}");
        for line in ["actually processed: 400/400\n", "failed transactions: 0 (0.000%)\n"] {
            assert!(text.contains(line), "{mode}: {text}");
        }
    }
    let (connections, messages) = front.finish();
    assert!(connections >= 12 && messages > 3 * 400, "{connections}, {messages}");
}

#[towpath_testenv::needs(python, "python:pymemcache")]
#[test]
fn pymemcache_stores_and_counts() {
    let front =
        Front::start("memcached", "DIRECTORY/items", "--framing memcached-text --order serial --workers 3");
    front.python("memcached");
    let (connections, messages) = front.finish();
    assert!(connections >= 5 && messages > 1400, "{connections}, {messages}");
}

#[towpath_testenv::needs(python, "memccp", "memccat", "memcrm")]
#[test]
fn libmemcached_tools_copy_files() {
    let front =
        Front::start("memcached", "DIRECTORY/items", "--framing memcached-text --order serial --workers 3");
    for number in 0..20 {
        let name = format!("file-{number}");
        let text = format!("{number}\r\n").repeat(1000);
        front.file(&name, text.as_bytes());
        assert_eq!(front.run(&["memccp", "--servers=127.0.0.1:PORT", &name]), "");
        assert_eq!(front.run(&["memccat", "--servers=127.0.0.1:PORT", &name]), text + "\n");
    }
    assert_eq!(front.run(&["memcrm", "--servers=127.0.0.1:PORT", "file-1"]), "");
    let missing = front.fed(b"", &["memccat", "--servers=127.0.0.1:PORT", "file-1"]);
    assert!(!missing.status.success() && missing.stdout.is_empty(), "{missing:?}");
    let (connections, _) = front.finish();
    assert_eq!(connections, 42);
}

#[towpath_testenv::needs(python, "python:grpc", "python:hpack")]
#[test]
fn grpcio_calls_methods() {
    let front = Front::start("grpc", "", "--framing http2-frame --workers 2");
    front.python("grpc");
    let (connections, messages) = front.finish();
    assert_eq!(connections, 3);
    assert!(messages > 3 * 500, "{messages}");
}

#[towpath_testenv::needs(python, "python:pika")]
#[test]
fn pika_publishes_and_gets() {
    let front = Front::start("amqp", "", "--framing amqp091 --workers 1");
    front.python("amqp");
    let (connections, messages) = front.finish();
    assert_eq!(connections, 2);
    assert!(messages > 3 * 200 + 2 * 200 + 3 * 300, "{messages}");
}

#[towpath_testenv::needs(python, "kcat")]
#[test]
fn kcat_produces_and_consumes() {
    let front = Front::start("kafka", "", "--framing kafka --workers 1");
    let kcat = ["kcat", "-q", "-b", "127.0.0.1:PORT", "-t", "words"];
    let produce = |partition: &str, more: &[&str], text: &str| {
        let words = [&kcat[..], &["-P", "-p", partition, "-K", ":"], more].concat();
        assert_eq!(front.run_with(text.as_bytes(), &words), "");
    };
    let consume = |partition: &str, from: &str| {
        let words = ["-C", "-X", "check.crcs=true", "-p", partition, "-o", from, "-e", "-f", "%o %k:%s\n"];
        front.run(&[&kcat[..], &words].concat())
    };
    let lines =
        |range: std::ops::Range<u32>| -> String { range.map(|n| format!("key-{n}:value {n}\n")).collect() };
    let stored = |range: std::ops::Range<u32>, first: u32| -> String {
        range.map(|n| format!("{} key-{n}:value {n}\n", n - first)).collect()
    };
    produce("0", &[], &lines(0..3000));
    produce("1", &["-z", "gzip", "-X", "acks=0"], &lines(5000..5010));
    produce("0", &["-z", "gzip", "-X", "batch.num.messages=7"], &lines(3000..3500));
    assert_eq!(consume("0", "beginning"), stored(0..3500, 0));
    assert_eq!(consume("0", "3498"), stored(3498..3500, 0));
    assert_eq!(consume("0", "end"), "");
    assert_eq!(consume("1", "beginning"), stored(5000..5010, 5000));
    let listed = front.run(&["kcat", "-L", "-J", "-b", "127.0.0.1:PORT"]);
    assert!(listed.contains(r#""topic":"words","partitions":[{"partition":0,"leader":1"#), "{listed}");
    front.finish();
}

#[towpath_testenv::needs(python, "mosquitto_pub", "mosquitto_sub")]
#[test]
fn mosquitto_clients_subscribe_and_leave_wills() {
    let front = Front::start("mqtt", "", "--framing mqtt --workers 1");
    let subscribe = |mut client: Command, more: &[&str]| {
        let client = client.args(["-h", "127.0.0.1", "-p", &front.port, "-v"]).args(more);
        let mut client = client.stdout(Stdio::piped()).spawn().expect("mosquitto_sub starts");
        let mut lines = BufReader::new(client.stdout.take().expect("a pipe")).lines();
        // The retained message follows the answer to the subscription.
        let first = lines.next().expect("a line").expect("text");
        assert_eq!(first, "room/state ready");
        (client, lines.map(|line| line.expect("text")))
    };
    let publish = ["mosquitto_pub", "-h", "127.0.0.1", "-p", "PORT"];
    let (mut all, mut lines) =
        subscribe(front.client(&["mosquitto_sub"]), &["-t", "room/#", "-q", "1", "-C", "404"]);
    let (mut few, some) =
        subscribe(front.client(&["mosquitto_sub"]), &["-t", "room/+", "-t", "other", "-C", "3"]);
    for qos in ["0", "1"] {
        let text: String = (0..200).map(|number| format!("{qos} line {number}\n")).collect();
        let publish = [&publish[..], &["-t", "room/a/b", "-q", qos, "-l"]].concat();
        assert_eq!(front.run_with(text.as_bytes(), &publish), "");
        for number in 0..200 {
            assert_eq!(lines.next(), Some(format!("room/a/b {qos} line {number}")));
        }
    }
    // The server discards the will of a client that sends DISCONNECT.
    let will = ["--will-topic", "room/will", "--will-payload", "bye", "-t", "room/a/c", "-n"];
    assert_eq!(front.run(&[&publish[..], &will].concat()), "");
    assert_eq!(lines.next().as_deref(), Some("room/a/c (null)"));
    // The server publishes the will of a client that is killed.
    let will =
        ["-t", "room/state", "--will-topic", "room/will", "--will-payload", "killed", "--will-qos", "1"];
    let (mut killed, _) = subscribe(Command::new("mosquitto_sub"), &will);
    killed.kill().expect("a signal");
    killed.wait().expect("its end");
    assert_eq!(lines.next().as_deref(), Some("room/will killed"));
    assert_eq!(front.run(&[&publish[..], &["-t", "room/d", "-m", "last"]].concat()), "");
    assert_eq!(lines.collect::<Vec<_>>(), ["room/d last"]);
    assert_eq!(some.collect::<Vec<_>>(), ["room/will killed", "room/d last"]);
    for client in [&mut all, &mut few] {
        assert!(client.wait().expect("its end").success(), "it has its number of messages");
    }
    let (connections, _) = front.finish();
    assert_eq!(connections, 7);
}

#[towpath_testenv::needs(python, "python:websockets")]
#[test]
fn websockets_are_closed_by_both_sides() {
    let front = Front::start("websocket", "", "--framing websocket --workers 2");
    front.python("websocket");
    let (connections, _) = front.finish();
    assert_eq!(connections, 16);
}
