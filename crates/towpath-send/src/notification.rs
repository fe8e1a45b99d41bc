//! Parser of the socket error queue: control messages in, ranges of completion numbers out.
//!
//! References: Documentation/networking/msg_zerocopy.rst; include/uapi/linux/errqueue.h; cmsg(3); ip(7) IP_RECVERR.

/// SO_EE_ORIGIN_ZEROCOPY, include/uapi/linux/errqueue.h.
const ORIGIN_ZEROCOPY: u8 = 5;
/// SO_EE_CODE_ZEROCOPY_COPIED, include/uapi/linux/errqueue.h.
const CODE_COPIED: u8 = 1;
/// struct sock_extended_err.
const EXTENDED_ERR: usize = 16;

/// Level and type of the control messages that carry a `sock_extended_err`: SOL_IP/IP_RECVERR and SOL_IPV6/IPV6_RECVERR.
const PLACES: [(i32, i32); 2] = [(0, 11), (41, 25)];

/// A completion notification: the kernel has completed the zero-copy calls numbered `first..=last`. The numbers are u32 and
/// wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first number (`ee_info`).
    pub first: u32,
    /// The last number (`ee_data`), inclusive.
    pub last: u32,
    /// SO_EE_CODE_ZEROCOPY_COPIED: the kernel copied the data. A range merged from several has the code of one of them, so the
    /// flag is conclusive only for a range of one number.
    pub copied: bool,
}

impl Range {
    /// Count of numbers in the range: 1 to 2^32.
    pub const fn count(self) -> u64 {
        self.last.wrapping_sub(self.first) as u64 + 1
    }
}

/// A `sock_extended_err` that is not a zero-copy notification: a timestamp or an ICMP error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtendedError {
    /// `ee_errno`: an errno value, or ENOMSG for a timestamp.
    pub errno: u32,
    /// `ee_origin`: SO_EE_ORIGIN_LOCAL, _ICMP, _ICMP6, _TIMESTAMPING...
    pub origin: u8,
    /// `ee_type`: the ICMP type, for an ICMP error.
    pub kind: u8,
    /// `ee_code`: the ICMP code.
    pub code: u8,
    /// `ee_info`: depends on the origin; the MTU for "fragmentation needed".
    pub info: u32,
    /// `ee_data`: depends on the origin.
    pub data: u32,
}

/// One entry of the error queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Completed zero-copy calls.
    Zerocopy(Range),
    /// Any other extended error.
    Other(ExtendedError),
}

/// Returns the first `sock_extended_err` in the control messages of recvmsg(2) with MSG_ERRQUEUE; the kernel puts one into each
/// entry. Never reads outside `control`, whatever lengths it contains.
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
        // The offender's address follows (SO_EE_OFFENDER).
        err.extend([0; 16]);
        err
    }

    #[test]
    fn control_messages_are_parsed() {
        let range = |first, last, copied| Some(Event::Zerocopy(Range { first, last, copied }));
        let icmp = ExtendedError { errno: 111, origin: 2, kind: 3, code: 3, info: 0, data: 0 };
        let rows = [
            (cmsg(0, 11, &extended(0, [5, 0, 0], 3, 7)), range(3, 7, false)),
            (cmsg(41, 25, &extended(0, [5, 0, 1], u32::MAX, 0)), range(u32::MAX, 0, true)),
            // A preceding timestamp message with a padded length.
            ([cmsg(1, 29, &[0; 5]), cmsg(0, 11, &extended(0, [5, 0, 0], 1, 1))].concat(), range(1, 1, false)),
            (cmsg(0, 11, &extended(111, [2, 3, 3], 0, 0)), Some(Event::Other(icmp))),
            // A different control message; a truncated one; invalid lengths.
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
