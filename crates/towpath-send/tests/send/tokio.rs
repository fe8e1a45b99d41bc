//! Tests of the tokio sender.
#![cfg(feature = "tokio")]

use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use towpath_send::{AsyncSender, CopyMode, Options, Pool, SendError};

const PATIENCE: Duration = Duration::from_secs(60);

fn options() -> Options {
    Options { choice: CopyMode::Zerocopy, min_zerocopy: 1, tamper_check: true, ..Options::default() }
}

async fn pair() -> (std::net::TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (stream.into_std().unwrap(), listener.accept().await.unwrap().0)
}

#[tokio::test]
async fn data_arrives_and_frames_return() {
    let (stream, mut peer) = pair().await;
    let mut sender = AsyncSender::new(stream, Options { max_frames: 8, ..options() }).unwrap();
    let mut pool = Pool::new(10, 200_000, true).unwrap();
    let reader = tokio::spawn(async move {
        let mut all = Vec::new();
        peer.read_to_end(&mut all).await.map(|_| all)
    });
    let mut expected = Vec::new();
    for n in 0..200_u8 {
        let mut frame = pool.take().expect("more frames than max_frames");
        frame.put(&vec![n; 1000 * usize::from(n)]);
        expected.extend_from_slice(&frame);
        sender.queue(n.into(), frame).await.unwrap();
    }
    let closed = sender.close(PATIENCE).await.unwrap();
    assert!(closed.finished);
    assert_eq!(closed.counters.completed, closed.counters.numbers);
    assert!(closed.counters.numbers > 0 && closed.counters.tampered == 0);
    assert!(reader.await.unwrap().unwrap() == expected);
}

#[tokio::test]
async fn a_disconnect_is_an_error() {
    let (stream, mut peer) = pair().await;
    let mut sender = AsyncSender::new(stream, options()).unwrap();
    let peer = tokio::spawn(async move {
        let mut some = vec![0; 1 << 20];
        peer.read_exact(&mut some).await.map(drop)
    });
    let error = loop {
        if let Err(error) = sender.send(vec![1; 256 << 10]).await {
            break error;
        }
    };
    assert!(matches!(error, SendError::Gone(_)), "{error}");
    peer.await.unwrap().unwrap();
    assert!(!sender.close(PATIENCE).await.unwrap().finished);
}

/// Like the test of the blocking sender.
#[tokio::test]
async fn discarded_data_is_not_reported_as_sent() {
    for error_taken in [false, true] {
        let (stream, peer) = pair().await;
        let watched = stream.try_clone().unwrap();
        let mut sender = AsyncSender::new(stream, options()).unwrap();
        sender.queue(1, vec![7; 256 << 10]).await.unwrap();
        sender.flush().await.unwrap();
        rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
        drop(peer);
        let mut fds = [rustix::event::PollFd::new(&watched, rustix::event::PollFlags::empty())];
        while !fds[0].revents().contains(rustix::event::PollFlags::HUP) {
            rustix::event::poll(&mut fds, None).unwrap();
        }
        if error_taken {
            for _ in 0..2 {
                assert!(matches!(sender.drain().await, Err(SendError::Gone(_))));
            }
        }
        assert!(!sender.close(PATIENCE).await.unwrap().finished, "error_taken: {error_taken}");
    }
}

#[tokio::test]
async fn close_times_out_on_a_stalled_peer() {
    let (stream, peer) = pair().await;
    let mut sender = AsyncSender::new(stream, Options { keep_done: true, ..options() }).unwrap();
    for token in 0..100 {
        sender.queue(token, vec![1; 256 << 10]).await.unwrap();
    }
    let closed = sender.close(Duration::from_millis(10)).await.unwrap();
    assert!(!closed.finished);
    let remains = closed.remains;
    assert_eq!(remains.done.len() + remains.unsent.len() + remains.quarantine.len(), 100);
    drop(peer);
}
