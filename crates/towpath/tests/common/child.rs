//! Processes that tests wait for.

use std::io::Read;
use std::os::fd::AsFd;
use std::process::Child;

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

/// Fails if a process has ended, with what it has written to standard error, which is a pipe.
pub(crate) fn assert_runs(child: &Child) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    if waitid(WaitId::Pid(Pid::from_child(child)), options).unwrap().is_some() {
        let stderr = child.stderr.as_ref().unwrap().as_fd().try_clone_to_owned().unwrap();
        let mut said = String::new();
        std::fs::File::from(stderr).read_to_string(&mut said).unwrap();
        panic!("it has ended: {said}");
    }
}
