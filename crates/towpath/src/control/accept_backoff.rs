//! A listener that the system refuses descriptors or memory (accept(2): EMFILE, ENFILE, ENOMEM): nothing is taken from it for a
//! while. Its socket would stay readable, and whoever waits for it would only spin; connections wait in the kernel meanwhile.

use std::fmt::Display;
use std::io;
use std::time::{Duration, Instant};

/// How long nothing is taken.
const PAUSE: Duration = Duration::from_secs(1);

/// See the module's text.
#[derive(Debug)]
pub(crate) struct AcceptBackoff {
    name: String,
    until: Option<Instant>,
    /// How often it was so.
    count: u64,
}

impl AcceptBackoff {
    /// That of a listener that is called so.
    pub(crate) fn of(name: impl Display) -> Self {
        Self { name: name.to_string(), until: None, count: 0 }
    }

    /// The system has refused one: it is told the first time, and then ever more rarely.
    pub(crate) fn begin(&mut self, error: &io::Error) {
        self.until = Some(Instant::now() + PAUSE);
        self.count += 1;
        if self.count.is_power_of_two() {
            log::warn!(
                "{}: {error}; connections wait ({} times so far): raise the limit of open files (`ulimit -n`, LimitNOFILE=)",
                self.name,
                self.count
            );
        }
    }

    /// Whether nothing is to be taken now.
    pub(crate) fn is_on(&mut self) -> bool {
        self.until = self.until.filter(|until| Instant::now() < *until);
        self.until.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_by_itself() {
        let mut pause = AcceptBackoff::of("a listener");
        assert!(!pause.is_on());
        pause.begin(&io::ErrorKind::Other.into());
        assert!(pause.is_on());
        pause.until = Some(Instant::now());
        assert!(!pause.is_on());
    }
}
