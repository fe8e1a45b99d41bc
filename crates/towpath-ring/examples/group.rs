//! One publisher, several listeners, one copy of each message. In one terminal `group serve /tmp/group.sock`, in others
//! `group listen /tmp/group.sock`.

use std::error::Error;
use std::io::BufRead;

use towpath_ring::{Config, Consumer, Group, Meta, Verdict};

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    match (words.next().as_deref(), words.next()) {
        (Some("serve"), Some(path)) => serve(&path),
        (Some("listen"), Some(path)) => listen(&path),
        _ => Err("usage: group serve|listen SOCKET".into()),
    }
}

/// Every line of the standard input goes to whoever listens.
fn serve(path: &str) -> Result<(), Box<dyn Error>> {
    let mut group = Group::bind(path, Config { deadline: None, ..Config::default() })?;
    for line in std::io::stdin().lock().lines() {
        while let Some(joined) = group.accept()? {
            println!("{joined:?}");
        }
        let listeners = group.send(line?.as_bytes(), &Meta::default());
        group.kick();
        group.poll_verdicts(0, |_, _, _| {});
        group.remove_dead(|member, frame| println!("{member:?} left frame {frame} behind"));
        println!("{listeners} listeners have it");
    }
    Ok(())
}

fn listen(path: &str) -> Result<(), Box<dyn Error>> {
    let mut queue = Consumer::attach(path)?;
    while let Some(frame) = queue.recv()? {
        match frame.header().gap() {
            Some(gap) => println!("{} messages were lost: {:?}", gap.count, gap.loss),
            None => println!("{}", String::from_utf8_lossy(queue.payload(&frame))),
        }
        queue.verdict(frame, Verdict::Pass);
    }
    Ok(())
}
