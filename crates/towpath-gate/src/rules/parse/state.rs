//! Parses state options: keep-state, record-state, limit and set-limit with their arguments.

use super::action::{check_name, state_name};
use crate::rules::cursor::{Cursor, Parse, bad_number, number};
use crate::rules::diagnostic::{Fault, quoted};
use crate::rules::option::{Arg, arg};
use crate::rules::rule::{Limit, StateOption};
use crate::state::Tracking;

/// Parses a state option with its arguments.
pub(crate) fn state(cursor: &mut Cursor<'_, '_>) -> Parse<StateOption> {
    let word = cursor.need("the state option")?;
    let (probe, limited) = match &*word.text {
        "keep-state" => (true, false),
        "record-state" => (false, false),
        "limit" => (true, true),
        _ => (false, true),
    };
    let limit = if limited { Some(limit(cursor, &word.text)?) } else { None };
    let name = state_name(cursor, false)?;
    Ok(StateOption { probe, limit, name, lifetime: None, tracking: Tracking::Ipfw, offload: false })
}

fn limit(cursor: &mut Cursor<'_, '_>, word: &str) -> Parse<Limit> {
    const FIELDS: [&str; 4] = ["src-addr", "src-port", "dst-addr", "dst-port"];
    let mut limit = Limit {
        src_addr: false,
        src_net: None,
        dst_net: None,
        src_port: false,
        dst_addr: false,
        dst_port: false,
        max: Arg::Tablearg,
        per_second: false,
        shared: None,
    };
    let mut any = false;
    while let Some(found) = cursor.peek() {
        if cursor.eat("all") {
            (limit.src_addr, limit.src_port, limit.dst_addr, limit.dst_port) = (true, true, true, true);
            any = true;
            continue;
        }
        let (field, net) = found.split_once('/').map_or((found, None), |(field, net)| (field, Some(net)));
        let nets = match field {
            "src-addr" => Some((&mut limit.src_addr, Some(&mut limit.src_net))),
            "src-port" => Some((&mut limit.src_port, None)),
            "dst-addr" => Some((&mut limit.dst_addr, Some(&mut limit.dst_net))),
            "dst-port" => Some((&mut limit.dst_port, None)),
            _ => None,
        };
        let at = cursor.here();
        match (nets, net) {
            (None, _) => break,
            (Some((true, _)), _) => return Err(Fault::new(at, format!("duplicate \"{field}\""))),
            (Some((asked, _)), None) => *asked = true,
            (Some((asked, Some(lengths))), Some(net)) => {
                let read = prefix_lengths(net).ok_or_else(|| {
                    Fault::new(at, format!("{} is not a valid prefix length", quoted(net)))
                        .hint(format!("{field}/24, or {field}/24/64 for IPv4 and IPv6"))
                })?;
                (*asked, *lengths) = (true, Some(read));
            }
            (Some((_, None)), Some(_)) => {
                return Err(Fault::new(at, format!("a port has no prefix length: write \"{field}\"")));
            }
        }
        any = true;
        cursor.take();
    }
    if !any {
        let at = cursor.here();
        let fault = Fault::new(at, format!("\"{word}\" needs one of src-addr, src-port, dst-addr, dst-port"));
        return Err(match cursor.peek() {
            Some(found) => fault.did_you_mean(found, FIELDS),
            None => fault,
        });
    }
    match cursor.peek().and_then(|max| max.strip_suffix("/second")) {
        Some(max) => {
            let at = cursor.here();
            cursor.take();
            // A bucket of nanoseconds cannot represent a higher rate.
            let most = 1_000_000_000;
            let number = number(max).filter(|max| (1..=most).contains(max));
            limit.max = Arg::Number(number.ok_or_else(|| bad_number(at, max, "rate", 1, most))?);
            limit.per_second = true;
        }
        None => limit.max = arg(cursor, "limit", 1, u32::MAX)?,
    }
    if cursor.eat("shared") {
        let token = cursor.need("the name of the shared limit")?;
        let name = check_name(&token.text, "limit name");
        limit.shared = Some(name.map_err(|message| Fault::new(token.position(), message))?);
    }
    Ok(limit)
}

/// Parses `24` or `24/64`: prefix lengths for IPv4 and IPv6. A single number applies to both.
fn prefix_lengths(text: &str) -> Option<(u8, u8)> {
    let length = |text: &str, most: u8| text.parse().ok().filter(|length| (1..=most).contains(length));
    match text.split_once('/') {
        Some((v4, v6)) => Some((length(v4, 32)?, length(v6, 128)?)),
        None => length(text, 128).map(|both| (both.min(32), both)),
    }
}
