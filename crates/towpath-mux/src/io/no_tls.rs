//! Uninhabited substitutes for `tls.rs` without feature `tls`.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::connection_info::ConnectionInfo;
use super::link::ReadOutcome;
use super::unix_peer::UnixPeer;
use crate::mux::{Cause, Outcome, Transmit};

#[derive(Clone, Debug)]
pub(super) enum Tls {}

impl Tls {
    pub(super) fn session(&self) -> io::Result<Session> {
        match *self {}
    }

    pub(super) fn time(&self) -> Duration {
        match *self {}
    }
}

#[derive(Debug)]
pub(super) enum Session {}

impl Session {
    pub(super) fn advance_handshake(&self, _: &OwnedFd, _: Option<&UnixPeer>) -> HandshakeStep {
        match *self {}
    }

    pub(super) fn early(&self) -> (Vec<u8>, bool) {
        match *self {}
    }

    pub(super) fn read(
        &self,
        _: &OwnedFd,
        _: Option<&UnixPeer>,
        _: &mut Vec<u8>,
    ) -> Result<ReadOutcome, Cause> {
        match *self {}
    }

    pub(super) fn write(&self, _: &OwnedFd, _: &mut Transmit) -> Outcome {
        match *self {}
    }

    pub(super) fn names(&self, _: ConnectionInfo) -> ConnectionInfo {
        match *self {}
    }

    pub(super) fn close(&self, _: &OwnedFd) {
        match *self {}
    }
}

/// Progress of a handshake.
#[derive(Debug)]
#[allow(dead_code)] // The cases of TLS.
pub(super) enum HandshakeStep {
    Done,
    More { write: bool },
    Failed(String),
}
