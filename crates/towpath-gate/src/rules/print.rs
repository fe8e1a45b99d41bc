//! Prints rules in normalised form, in the order of `ipfw list`.

use std::fmt::{self, Display, Formatter, Write};

use super::option::{Arg, CodePoint, Term, Test, comma_list};
use super::rule::*;

/// Names of ICMP unreachable codes (RFC 792, 1122, 1812).
pub(crate) const UNREACH: &[(&str, u8)] = &[
    ("net", 0),
    ("host", 1),
    ("protocol", 2),
    ("port", 3),
    ("needfrag", 4),
    ("srcfail", 5),
    ("net-unknown", 6),
    ("host-unknown", 7),
    ("isolated", 8),
    ("net-prohib", 9),
    ("host-prohib", 10),
    ("tosnet", 11),
    ("toshost", 12),
    ("filter-prohib", 13),
    ("host-precedence", 14),
    ("precedence-cutoff", 15),
];
/// Names of ICMPv6 unreachable codes (RFC 4443).
pub(crate) const UNREACH6: &[(&str, u8)] =
    &[("no-route", 0), ("admin-prohib", 1), ("address", 3), ("port", 4)];

impl Display for Rule {
    /// Prints the rule as `ipfw list` does, without number and set: `allow tcp from any to me 22 keep-state`.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if let Some(prob) = self.prob {
            write!(f, "prob {} ", Probability(prob))?;
        }
        self.action.fmt(f)?;
        if let Some(log) = self.log {
            f.write_str(" log")?;
            if let Some(amount) = log.amount {
                write!(f, " logamount {amount}")?;
            }
        }
        if let Some(tag) = self.tag {
            write!(f, " {} {}", if tag.remove { "untag" } else { "tag" }, tag.tag)?;
        }
        self.body.fmt(f)?;
        if let Some(state) = &self.state {
            write!(f, " {state}")?;
        }
        if self.defer {
            f.write_str(" defer-action")?;
        }
        match &self.comment {
            Some(comment) => write!(f, " // {comment}"),
            None => Ok(()),
        }
    }
}

/// Prints `prob` as written: the shortest decimal that yields the same 31 bits.
struct Probability(u32);

impl Display for Probability {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let exact = f64::from(self.0) / f64::from(PROB_ONE);
        for digits in 1..=12 {
            let text = format!("{exact:.digits$}");
            if text.parse().is_ok_and(|p: f64| probability(p) == self.0) {
                return f.write_str(&text);
            }
        }
        write!(f, "{exact}")
    }
}

/// Probability 1 in ipfw's 31 bits.
pub(crate) const PROB_ONE: u32 = 0x7fff_ffff;

/// Converts a probability (above 0, at most 1) to ipfw's 31 bits.
pub(crate) fn probability(p: f64) -> u32 {
    (p * f64::from(PROB_ONE)).round() as u32
}

impl Display for Action {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allow => f.write_str("allow"),
            Self::Deny => f.write_str("deny"),
            Self::Reject => f.write_str("reject"),
            Self::Unreach { code, mtu } => {
                match UNREACH.iter().find(|(_, c)| c == code) {
                    Some((name, _)) => write!(f, "unreach {name}")?,
                    None => write!(f, "unreach {code}")?,
                }
                mtu.map_or(Ok(()), |mtu| write!(f, " {mtu}"))
            }
            Self::Unreach6(code) => match UNREACH6.iter().find(|(_, c)| c == code) {
                Some((name, _)) => write!(f, "unreach6 {name}"),
                None => write!(f, "unreach6 {code}"),
            },
            Self::Reset => f.write_str("reset"),
            Self::Reset6 => f.write_str("reset6"),
            Self::Abort => f.write_str("abort"),
            Self::Abort6 => f.write_str("abort6"),
            Self::Count => f.write_str("count"),
            Self::CheckState(name) => write!(f, "check-state {name}"),
            Self::Skipto(target) => write!(f, "skipto {target}"),
            Self::Call(target) => write!(f, "call {target}"),
            Self::Return(ReturnTo::NextRulenum) => f.write_str("return"),
            Self::Return(ReturnTo::NextRule) => f.write_str("return next-rule"),
            Self::Inspect(queue) => write!(f, "inspect {queue}"),
            Self::Divert(queue) => write!(f, "divert {queue}"),
            Self::Tee(queue) => write!(f, "tee {queue}"),
            Self::Pipe(pipe) => write!(f, "pipe {pipe}"),
            Self::Forward(NextHop::Address(ip, Some(port))) => write!(f, "fwd {ip},{port}"),
            Self::Forward(NextHop::Address(ip, None)) => write!(f, "fwd {ip}"),
            Self::Forward(NextHop::Tablearg) => f.write_str("fwd tablearg"),
            Self::Reass => f.write_str("reass"),
            Self::SetDscp(Arg::Number(dscp)) => write!(f, "setdscp {}", CodePoint(*dscp as u8)),
            Self::SetDscp(Arg::Tablearg) => f.write_str("setdscp tablearg"),
            Self::SetMark(Arg::Number(mark)) => write!(f, "setmark {mark:#x}"),
            Self::SetMark(Arg::Tablearg) => f.write_str("setmark tablearg"),
            Self::SetConnmark(mark) => write!(f, "setconnmark {mark:#x}"),
            Self::TcpSetMss(mss) => write!(f, "tcp-setmss {mss}"),
            Self::StateTimeout(seconds) => write!(f, "state-timeout {seconds}"),
            Self::SetZone(zone) => write!(f, "setzone {zone}"),
        }
    }
}

impl Display for Target {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Tablearg => f.write_str("tablearg"),
            Self::Label { name, .. } => write!(f, ":{name}"),
        }
    }
}

impl Display for StateName {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str(":default"),
            Self::Named(name) => write!(f, ":{name}"),
            Self::Any => f.write_str(":any"),
        }
    }
}

impl Display for StateOption {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match (&self.limit, self.probe) {
            (None, true) => f.write_str("keep-state")?,
            (None, false) => f.write_str("record-state")?,
            (Some(limit), probe) => {
                f.write_str(if probe { "limit" } else { "set-limit" })?;
                for (asked, word, net) in [
                    (limit.src_addr, "src-addr", limit.src_net),
                    (limit.src_port, "src-port", None),
                    (limit.dst_addr, "dst-addr", limit.dst_net),
                    (limit.dst_port, "dst-port", None),
                ] {
                    if asked {
                        write!(f, " {word}")?;
                    }
                    if let Some((v4, v6)) = net {
                        write!(f, "/{v4}/{v6}")?;
                    }
                }
                write!(f, " {}{}", limit.max, if limit.per_second { "/second" } else { "" })?;
                if let Some(name) = &limit.shared {
                    write!(f, " shared {name}")?;
                }
            }
        }
        write!(f, " {}", self.name)?;
        if let Some(word) = self.tracking.word() {
            write!(f, " {word}")?;
        }
        if self.offload {
            f.write_str(" offload")?;
        }
        self.lifetime.map_or(Ok(()), |seconds| write!(f, " lifetime {seconds}"))
    }
}

impl Display for Body {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.form != Form::Options {
            f.write_char(' ')?;
            block(f, &self.proto)?;
        }
        if self.form == Form::Full {
            f.write_str(" from ")?;
            block(f, &self.src)?;
            if let Some(ports) = &self.src_port {
                bare_ports(f, ports)?;
            }
            f.write_str(" to ")?;
            block(f, &self.dst)?;
            if let Some(ports) = &self.dst_port {
                bare_ports(f, ports)?;
            }
        }
        for option in &self.options {
            f.write_char(' ')?;
            // In the option list, each test is printed with its keyword.
            braces(f, option, |f, term| {
                if term.not {
                    f.write_str("not ")?;
                }
                term.test.fmt(f)
            })?;
        }
        Ok(())
    }
}

/// Returns a block in the form of options: each test with its keyword.
pub(crate) fn block_text(terms: &[Term]) -> String {
    let each = |term: &Term| format!("{}{}", if term.not { "not " } else { "" }, term.test);
    let texts: Vec<String> = terms.iter().map(each).collect();
    if let [one] = &texts[..] { one.clone() } else { format!("{{ {} }}", texts.join(" or ")) }
}

/// Prints a protocol or address block: the tests without their keywords.
fn block(f: &mut Formatter<'_>, terms: &[Term]) -> fmt::Result {
    braces(f, terms, |f, term| {
        if term.not {
            f.write_str("not ")?;
        }
        match &term.test {
            Test::Proto(proto) => proto.fmt(f),
            Test::Src(list) | Test::Dst(list) => comma_list(f, list),
            other => other.fmt(f),
        }
    })
}

fn bare_ports(f: &mut Formatter<'_>, term: &Term) -> fmt::Result {
    f.write_str(if term.not { " not " } else { " " })?;
    match &term.test {
        Test::SrcPort(ports) | Test::DstPort(ports) => ports.fmt(f),
        other => other.fmt(f),
    }
}

fn braces(
    f: &mut Formatter<'_>,
    terms: &[Term],
    mut each: impl FnMut(&mut Formatter<'_>, &Term) -> fmt::Result,
) -> fmt::Result {
    if let [term] = terms {
        return each(f, term);
    }
    f.write_str("{ ")?;
    for (i, term) in terms.iter().enumerate() {
        if i > 0 {
            f.write_str(" or ")?;
        }
        each(f, term)?;
    }
    f.write_str(" }")
}
