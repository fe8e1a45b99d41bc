//! What the error queue says: control messages as bytes, in; ranges of numbers, out.
//!
//! References: Documentation/networking/msg_zerocopy.rst; include/uapi/linux/errqueue.h; cmsg(3); ip(7) IP_RECVERR.

/// SO_EE_ORIGIN_ZEROCOPY, include/uapi/linux/errqueue.h.
const ORIGIN_ZEROCOPY: u8 = 5;
/// SO_EE_CODE_ZEROCOPY_COPIED, include/uapi/linux/errqueue.h.
const CODE_COPIED: u8 = 1;
/// struct sock_extended_err.
const EXTENDED_ERR: usize = 16;

/// SOL_IP and IP_RECVERR, SOL_IPV6 and IPV6_RECVERR: where the kernel puts a `sock_extended_err`.
const PLACES: [(i32, i32); 2] = [(0, 11), (41, 25)];

/// A notification range: the numbers `first..=last` of zero-copy calls that the kernel is done with, on the wire as u32
/// that wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first number (`ee_info`).
    pub first: u32,
    /// The last number (`ee_data`), inclusive.
    pub last: u32,
    /// SO_EE_CODE_ZEROCOPY_COPIED: the kernel copied after all. A range that was put together from several keeps the
    /// code of one of them, so this judges a range of one number only.
    pub copied: bool,
}

impl Range {
    /// How many numbers it has: 1 to 2^32.
    pub const fn count(self) -> u64 {
        self.last.wrapping_sub(self.first) as u64 + 1
    }
}

/// A `sock_extended_err` that is no zero-copy notification: a timestamp, an ICMP error. It is for the socket's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtendedError {
    /// `ee_errno`: an errno value, or ENOMSG for a timestamp.
    pub errno: u32,
    /// `ee_origin`: SO_EE_ORIGIN_LOCAL, _ICMP, _ICMP6, _TIMESTAMPING...
    pub origin: u8,
    /// `ee_type`: ICMP's type, for an ICMP error.
    pub kind: u8,
    /// `ee_code`: ICMP's code.
    pub code: u8,
    /// `ee_info`: by origin; the MTU of "fragmentation needed".
    pub info: u32,
    /// `ee_data`: by origin.
    pub data: u32,
}

/// One entry of the error queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Calls that the kernel is done with.
    Zerocopy(Range),
    /// Something else, to be passed on.
    Other(ExtendedError),
}

/// The first `sock_extended_err` in the control messages that recvmsg(2) with MSG_ERRQUEUE gave; the kernel puts one into
/// each. Nothing outside of `control` is read, whatever lengths stand in it.
pub fn parse(mut control: &[u8]) -> Option<Event> {
    // struct cmsghdr: size_t cmsg_len; int cmsg_level; int cmsg_type.
    const WORD: usize = size_of::<usize>();
    const HEADER: usize = WORD + 8;
    while let Some((header, rest)) = control.split_at_checked(HEADER) {
        let len = usize::from_ne_bytes(*header.first_chunk()?);
        let level = int(header, WORD)?;
        let kind = int(header, WORD + 4)?;
        let data = rest.get(..len.checked_sub(HEADER)?)?;
        if PLACES.contains(&(level as i32, kind as i32)) && data.len() >= EXTENDED_ERR {
            return event(data);
        }
        control = rest.get(data.len().next_multiple_of(WORD)..)?;
    }
    None
}

fn event(err: &[u8]) -> Option<Event> {
    let &[origin, kind, code, _pad] = err.get(4..8)?.first_chunk()?;
    let (errno, info, data) = (int(err, 0)?, int(err, 8)?, int(err, 12)?);
    if origin == ORIGIN_ZEROCOPY && errno == 0 {
        let copied = code & CODE_COPIED != 0;
        return Some(Event::Zerocopy(Range { first: info, last: data, copied }));
    }
    Some(Event::Other(ExtendedError { errno, origin, kind, code, info, data }))
}

fn int(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A control message with its padding.
    fn cmsg(level: i32, kind: i32, data: &[u8]) -> Vec<u8> {
        let mut bytes = (size_of::<usize>() + 8 + data.len()).to_ne_bytes().to_vec();
        bytes.extend(level.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(size_of::<usize>()), 0);
        bytes
    }

    fn extended(errno: u32, [origin, kind, code]: [u8; 3], info: u32, data: u32) -> Vec<u8> {
        let mut err = errno.to_ne_bytes().to_vec();
        err.extend([origin, kind, code, 0]);
        err.extend(info.to_ne_bytes());
        err.extend(data.to_ne_bytes());
        // The offender's address follows.
        err.extend([0; 16]);
        err
    }

    #[test]
    fn rows() {
        let range = |first, last, copied| Some(Event::Zerocopy(Range { first, last, copied }));
        let icmp = ExtendedError { errno: 111, origin: 2, kind: 3, code: 3, info: 0, data: 0 };
        let rows = [
            (cmsg(0, 11, &extended(0, [5, 0, 0], 3, 7)), range(3, 7, false)),
            (cmsg(41, 25, &extended(0, [5, 0, 1], u32::MAX, 0)), range(u32::MAX, 0, true)),
            // A timestamp's message first, of a length that is padded.
            ([cmsg(1, 29, &[0; 5]), cmsg(0, 11, &extended(0, [5, 0, 0], 1, 1))].concat(), range(1, 1, false)),
            (cmsg(0, 11, &extended(111, [2, 3, 3], 0, 0)), Some(Event::Other(icmp))),
            // Not a place of extended errors; cut short; a length that lies.
            (cmsg(1, 11, &extended(0, [5, 0, 0], 3, 7)), None),
            (cmsg(0, 11, &[0; 15]), None),
            (vec![0xff; 64], None),
            (vec![0; 64], None),
            (Vec::new(), None),
        ];
        for (control, expected) in rows {
            assert_eq!(parse(&control), expected, "{control:02x?}");
        }
    }

    #[test]
    fn counts_wrap() {
        let count = |first, last| Range { first, last, copied: false }.count();
        assert_eq!(count(u32::MAX, u32::MAX), 1);
        assert_eq!(count(u32::MAX - 1, 1), 4);
        assert_eq!(count(1, 0), 1 << 32);
    }
}
