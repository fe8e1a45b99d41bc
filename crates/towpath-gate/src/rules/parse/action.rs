//! Parses `prob`, the action with its argument, `log` and `tag`.

use std::net::IpAddr;

use crate::rules::cursor::{Cursor, Parse, bad_number, number};
use crate::rules::diagnostic::{Fault, quoted};
use crate::rules::keywords::{ACTIONS, NO_ACTIONS, refused};
use crate::rules::option::{Arg, DSCP, arg, code_point};
use crate::rules::print::{PROB_ONE, UNREACH, UNREACH6, probability};
use crate::rules::rule::{Action, Log, NextHop, ReturnTo, StateName, Tag, Target};
use crate::state::LIFETIME_MAX;

/// Maximum length of a flow name or label.
const MAX_NAME: usize = 63;

pub(crate) fn prob(cursor: &mut Cursor<'_, '_>) -> Parse<Option<u32>> {
    if !cursor.eat("prob") {
        return Ok(None);
    }
    let token = cursor.need("the probability")?;
    match token.text.parse::<f64>() {
        Ok(p) if p > 0.0 && p <= 1.0 => {
            let bits = probability(p).max(1);
            Ok((bits < PROB_ONE).then_some(bits))
        }
        _ => Err(Fault::new(token.position(), format!("{} is not a valid probability", quoted(&token.text)))
            .hint("use a number above 0 and at most 1")),
    }
}

pub(crate) fn action(cursor: &mut Cursor<'_, '_>) -> Parse<Action> {
    let token = cursor.need("the action")?;
    Ok(match &*token.text {
        "allow" | "accept" | "pass" | "permit" => Action::Allow,
        "deny" | "drop" => Action::Deny,
        "reject" => Action::Reject,
        "unreach" => unreach(cursor)?,
        "unreach6" => Action::Unreach6(code(cursor, "ICMPv6 unreachable code", UNREACH6)?),
        "reset" => Action::Reset,
        "reset6" => Action::Reset6,
        "abort" => Action::Abort,
        "abort6" => Action::Abort6,
        "count" => Action::Count,
        "check-state" => Action::CheckState(state_name(cursor, true)?),
        "skipto" => Action::Skipto(target(cursor)?),
        "call" => Action::Call(target(cursor)?),
        "return" if cursor.eat("next-rule") => Action::Return(ReturnTo::NextRule),
        "return" => {
            cursor.eat("next-rulenum");
            Action::Return(ReturnTo::NextRulenum)
        }
        "inspect" => Action::Inspect(arg(cursor, "queue number", 0, 65535)?),
        "divert" => Action::Divert(arg(cursor, "queue number", 0, 65535)?),
        "tee" => Action::Tee(arg(cursor, "queue number", 0, 65535)?),
        "pipe" => Action::Pipe(arg(cursor, "pipe number", 1, 65535)?),
        "fwd" | "forward" => Action::Forward(next_hop(cursor)?),
        "reass" => Action::Reass,
        "setdscp" => Action::SetDscp(setdscp(cursor)?),
        "setmark" => Action::SetMark(arg(cursor, "mark", 0, u32::MAX)?),
        "setconnmark" => Action::SetConnmark(cursor.number("mark", 0, u32::MAX)?),
        "tcp-setmss" => Action::TcpSetMss(cursor.number("segment size", 1, 65535)? as u16),
        "state-timeout" => Action::StateTimeout(cursor.number("lifetime in seconds", 1, LIFETIME_MAX)?),
        "setzone" => Action::SetZone(cursor.number("zone", 1, 65535)? as u16),
        other => {
            let at = token.position();
            return Err(match refused(NO_ACTIONS, other) {
                Some((reason, instead)) => {
                    Fault::new(at, format!("action \"{other}\" is not supported: {reason}")).hint(instead)
                }
                None => Fault::new(at, format!("unknown action {}", quoted(other)))
                    .did_you_mean(other, ACTIONS.iter().copied()),
            });
        }
    })
}

pub(crate) fn log(cursor: &mut Cursor<'_, '_>) -> Parse<Option<Log>> {
    if !cursor.eat("log") {
        return Ok(None);
    }
    let mut log = Log::default();
    if cursor.eat("logamount") {
        log.amount = Some(cursor.number("logamount", 0, u32::MAX)?);
    }
    if cursor.peek() == Some("logdst") {
        let at = cursor.here();
        return Err(Fault::new(
            at,
            "\"logdst\" is not supported: the configuration sets the destination of the log",
        )
        .hint("remove it"));
    }
    Ok(Some(log))
}

pub(crate) fn tag(cursor: &mut Cursor<'_, '_>) -> Parse<Option<Tag>> {
    let remove = match cursor.peek() {
        Some("tag") => false,
        Some("untag") => true,
        _ => return Ok(None),
    };
    cursor.take();
    Ok(Some(Tag { remove, tag: arg(cursor, "tag", 1, 65534)? }))
}

/// Parses an optional `:NAME` after check-state and keep-state.
pub(crate) fn state_name(cursor: &mut Cursor<'_, '_>, any: bool) -> Parse<StateName> {
    let Some(name) = cursor.peek().and_then(|word| word.strip_prefix(':')) else {
        return Ok(StateName::Default);
    };
    let at = cursor.here();
    cursor.take();
    match name {
        "default" => Ok(StateName::Default),
        "any" if any => Ok(StateName::Any),
        "any" => Err(Fault::new(at, "\":any\" is only valid with check-state")),
        name => {
            check_name(name, "flow name").map(StateName::Named).map_err(|message| Fault::new(at, message))
        }
    }
}

pub(crate) fn check_name(name: &str, what: &str) -> Result<Box<str>, String> {
    if name.is_empty() || name.chars().any(|c| !c.is_ascii_graphic() || matches!(c, ':' | '/' | ',')) {
        return Err(format!("{} is not a valid {what}", quoted(name)));
    }
    if name.len() > MAX_NAME {
        return Err(format!("the {what} is longer than {MAX_NAME} characters"));
    }
    Ok(name.into())
}

fn target(cursor: &mut Cursor<'_, '_>) -> Parse<Target> {
    let token = cursor.need("the rule number or label")?;
    let text = &*token.text;
    if text == "tablearg" {
        return Ok(Target::Tablearg);
    }
    if let Some(label) = text.strip_prefix(':') {
        let name = check_name(label, "label").map_err(|message| Fault::new(token.position(), message))?;
        return Ok(Target::Label { name, number: 0, above: 0 });
    }
    match number(text) {
        Some(number) if (1..u32::MAX).contains(&number) => Ok(Target::Number(number)),
        _ => Err(Fault::new(token.position(), format!("{} is not a valid rule number", quoted(text)))
            .hint("use a number from 1 to 4294967294, \":LABEL\" or \"tablearg\"")),
    }
}

fn unreach(cursor: &mut Cursor<'_, '_>) -> Parse<Action> {
    let code = code(cursor, "ICMP unreachable code", UNREACH)?;
    let has_mtu = code == 4 && cursor.peek().is_some_and(|word| number(word).is_some());
    let mtu = if has_mtu { Some(cursor.number("MTU", 68, 65535)? as u16) } else { None };
    Ok(Action::Unreach { code, mtu })
}

fn code(cursor: &mut Cursor<'_, '_>, what: &str, names: &[(&str, u8)]) -> Parse<u8> {
    let token = cursor.need(&format!("the {what}"))?;
    let named = names.iter().find(|(name, _)| *name == token.text).map(|(_, code)| *code);
    named.or_else(|| token.text.parse().ok()).ok_or_else(|| {
        Fault::new(token.position(), format!("{} is not a valid {what}", quoted(&token.text)))
            .did_you_mean(&token.text, names.iter().map(|(name, _)| *name))
    })
}

fn setdscp(cursor: &mut Cursor<'_, '_>) -> Parse<Arg> {
    let token = cursor.need("the code point")?;
    if token.text == "tablearg" {
        return Ok(Arg::Tablearg);
    }
    code_point(&token.text).map(|point| Arg::Number(point.into())).ok_or_else(|| {
        Fault::new(token.position(), format!("{} is not a valid code point", quoted(&token.text)))
            .did_you_mean(&token.text, DSCP.iter().map(|(name, _)| *name))
    })
}

fn next_hop(cursor: &mut Cursor<'_, '_>) -> Parse<NextHop> {
    let token = cursor.need("the next hop")?;
    let text = &*token.text;
    if text == "tablearg" {
        return Ok(NextHop::Tablearg);
    }
    let wrong = || {
        Fault::new(token.position(), format!("{} is not a valid next hop", quoted(text)))
            .hint("use an address or address,port")
    };
    // `a,80`; `a:80` for IPv4; or an IPv6 address in brackets followed by either.
    let (addr, port) = match (text.split_once(','), text.strip_prefix('[')) {
        (Some((addr, port)), None) => (addr, Some(port)),
        (_, Some(rest)) => {
            let (addr, behind) = rest.split_once(']').ok_or_else(wrong)?;
            match behind.strip_prefix([',', ':']) {
                Some(port) => (addr, Some(port)),
                None if behind.is_empty() => (addr, None),
                None => return Err(wrong()),
            }
        }
        (None, None) => match text.split_once(':') {
            Some((addr, port)) if !port.contains(':') => (addr, Some(port)),
            _ => (text, None),
        },
    };
    let addr: IpAddr = addr.parse().map_err(|_| wrong())?;
    let port = match port {
        None => None,
        Some(port) => match crate::rules::ports::port(port) {
            Some(port) => Some(port),
            None => return Err(bad_number(token.position(), port, "port", 0, 65535)),
        },
    };
    Ok(NextHop::Address(addr, port))
}
