//! The paths where an endpoint may create its socket, and the files that it does not replace.

use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;

use towpath_ring::{BindError, Config, Consumer, Endpoint, Verdict};

#[test]
fn only_a_socket_without_a_listener_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ring.sock");
    let bind = || Endpoint::bind(&path, Config::default());

    // A killed engine leaves a socket file without a listener.
    drop(UnixDatagram::bind(&path).unwrap());
    assert!(path.exists());
    let living = bind().unwrap();
    assert!(matches!(bind(), Err(BindError::InUse(_))), "a living engine's socket stays");
    // The file was removed, and another engine has bound the path.
    std::fs::remove_file(&path).unwrap();
    let other = bind().unwrap();
    drop(living);
    assert!(matches!(bind(), Err(BindError::InUse(_))), "it leaves the other one's alone");
    drop(other);
    assert!(!path.exists());

    std::fs::write(&path, "somebody's file").unwrap();
    match bind() {
        Err(BindError::Listen { source, .. }) => assert_eq!(source.kind(), ErrorKind::AddrInUse),
        other => panic!("{other:?}"),
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "somebody's file");
}

#[test]
fn replacing_a_frame_that_was_given_back_does_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ring.sock");
    let mut endpoint = Endpoint::bind(&path, Config::default()).unwrap();
    let client = std::thread::spawn(move || {
        let mut queue = Consumer::attach(&path).unwrap();
        // Enough iterations to fill the TX ring if each lost a frame.
        for _ in 0..3000 {
            let Some(frame) = queue.recv().unwrap() else { return 0 };
            queue.verdict_upto(frame.id(), Verdict::Pass);
            queue.replace(frame, &[7; 1000]).unwrap();
        }
        3000
    });
    let mut channel = loop {
        match endpoint.accept().unwrap() {
            Some(channel) => break channel,
            None => endpoint.wait(None).unwrap(),
        }
    };
    let mut passed = 0;
    for _ in 0..3000 {
        channel.send(b"frame", &towpath_ring::Meta::default()).unwrap();
        while channel.poll_verdicts(1, |_, decision| passed += u32::from(decision.verdict == Verdict::Pass))
            == 0
        {
            channel.wait(None).unwrap();
        }
    }
    assert_eq!(passed, 3000);
    assert_eq!(client.join().unwrap(), 3000);
}
