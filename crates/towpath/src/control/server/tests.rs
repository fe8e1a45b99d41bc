use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::thread;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::json;
use towpath_ring::reaper::accept_descriptors;

use super::super::commands::{show_mux, show_rings, show_send};
use super::super::protocol::{Answer, parse_answer, request};
use super::super::query::WorkerPoolView;
use super::*;

/// A pool without workers.
struct Empty;

impl WorkerPoolView for Empty {
    fn rings(&self) -> Vec<show_rings::Ring> {
        Vec::new()
    }

    fn mux(&self) -> show_mux::Mux {
        show_mux::Mux::default()
    }

    fn send(&self) -> show_send::Send {
        show_send::Send::default()
    }
}

fn ask(mut stream: &UnixStream) -> Option<Answer> {
    stream.write_all(&request("show-rings", json!({}))).ok()?;
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut message = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut message).ok()?;
    parse_answer(&message[1..]).ok()
}

#[test]
fn the_socket_of_another_engine_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let one = Server::open(&path, None).unwrap();
    assert!(matches!(Server::open(&path, None), Err(BindError::InUse(_))));
    std::fs::remove_file(&path).unwrap();
    let (server, inbox) = Server::open(&path, None).unwrap();
    drop(one);
    assert!(UnixStream::connect(&path).is_ok());
    drop(inbox);
    drop(server);
    assert!(!path.exists());
}

#[test]
fn a_client_cannot_pass_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    // A kernel that refuses them, and one that does not.
    for older in [false, true] {
        let path = directory.path().join(format!("s{older}"));
        let listening = Listening::bind(&Control::private(&path)).unwrap();
        if older {
            accept_descriptors(&listening.listener).unwrap();
        }
        let (server, inboxes) = listening.start(None, vec![None]).unwrap();
        let stream = UnixStream::connect(&path).unwrap();
        let (mut watched, passed) = UnixStream::pair().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [passed.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = request("show-rings", json!({}));
        let sent = sendmsg(&stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty());
        match sent {
            // Disconnected without an answer.
            Ok(_) => assert_eq!((&stream).read(&mut [0; 16]).unwrap_or(0), 0),
            Err(error) => assert_eq!((error, older), (rustix::io::Errno::PERM, false)),
        }
        // No copy of the descriptor stays open.
        drop(passed);
        assert_eq!(watched.read(&mut [0]).unwrap(), 0);
        drop(inboxes);
        drop(server);
    }
}

#[test]
fn the_file_appears_with_the_narrowest_mode() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
    let (_listener, file) = bind(&path).unwrap();
    assert_eq!(mode(), 0o600);
    drop(file);
    let _listening = Listening::bind(&Control { mode: 0o666, ..Control::private(&path) }).unwrap();
    assert_eq!(mode(), 0o666);
}

#[test]
fn other_threads_answer_for_a_thread_that_has_ended() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let listening = Listening::bind(&Control::private(&path)).unwrap();
    let (server, mut inboxes) = listening.start(None, vec![None, None]).unwrap();
    drop(inboxes.remove(0));
    let asked = |inbox: &mut QueryInbox| {
        let path = path.clone();
        let client = thread::spawn(move || ask(&UnixStream::connect(path).unwrap()));
        while !client.is_finished() {
            inbox.serve_pool(&Empty);
            thread::yield_now();
        }
        client.join().unwrap()
    };
    for _ in 0..2 {
        let answer = asked(&mut inboxes[0]).expect("an answer");
        assert_eq!((&*answer.name, answer.body), ("rings", json!({ "rings": [] })));
    }
    drop(inboxes);
    drop(server);
}

#[test]
fn the_server_ends_although_the_engine_does_not_answer() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (server, inbox) = Server::open(&path, None).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(&request("show-rings", json!({}))).unwrap();
    // The inbox is not served.
    drop(server);
    assert!(!path.exists());
    // The connection may have been accepted or not.
    let _ = client.read_to_end(&mut Vec::new());
    drop(inbox);
}
