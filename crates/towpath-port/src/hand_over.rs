//! A port in two processes: what one hands over, and the other continues.
//!
//! The kernel's rings keep receiving in between. A port is handed over between two frames: no frame is lent, and none is half read. Its
//! positions are in the rings that both processes map, so they are read when the other process [resumes](crate::Port::resume).

use std::os::fd::OwnedFd;

use crate::Error;

/// What a port hands over.
#[derive(Debug, Default)]
pub struct HandOver {
    /// The descriptors. None: the interface does not exist, and the other process opens the port anew.
    pub descriptors: Vec<OwnedFd>,
    /// Parameters of the descriptors, by driver.
    pub numbers: Vec<u64>,
}

impl HandOver {
    /// Of the claim of the port's medium, if there is one, and of the port's own descriptors and parameters.
    pub(crate) fn of(claim: Option<OwnedFd>, own: Vec<OwnedFd>, numbers: &[u64]) -> Self {
        let claimed = u64::from(claim.is_some());
        let descriptors = claim.into_iter().chain(own).collect();
        Self { descriptors, numbers: std::iter::once(claimed).chain(numbers.iter().copied()).collect() }
    }

    /// The descriptors and numbers, if they are as many as these.
    ///
    /// # Errors
    /// Another version handed over the port `name`.
    pub(crate) fn parts<const D: usize, const N: usize>(
        self,
        name: &str,
    ) -> Result<([OwnedFd; D], [u64; N]), Error> {
        let other = || {
            Error::Config {
            name: name.to_owned(),
            what: "its descriptors were handed over by a version that this one cannot continue: restart the engine".into(),
        }
        };
        let descriptors = self.descriptors.try_into().map_err(|_| other())?;
        let numbers = self.numbers.try_into().map_err(|_| other())?;
        Ok((descriptors, numbers))
    }
}

/// The error of a port whose configuration differs from that of the port that was handed over.
pub(crate) fn changed(name: &str, what: &str) -> Error {
    Error::Config {
        name: name.to_owned(),
        what: format!("{what} cannot change at an upgrade: restart the engine"),
    }
}
