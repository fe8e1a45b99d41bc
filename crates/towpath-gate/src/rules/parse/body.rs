//! Parses the body of a rule: protocol, source, destination, options.

use super::state;
use crate::rules::address::Address;
use crate::rules::cursor::{Cursor, Parse};
use crate::rules::diagnostic::{Fault, nearest, quoted};
use crate::rules::keywords::NO_OPTIONS;
use crate::rules::option::{self, Block, Term, Test, addresses, ranges};
use crate::rules::ports::{self, Ranges};
use crate::rules::protocol::Protocol;
use crate::rules::rule::{Body, Form, StateOption};
use crate::state::{LIFETIME_MAX, Tracking};

/// A body, and the options that are not tests.
#[derive(Default)]
pub(crate) struct WholeBody {
    pub(crate) body: Body,
    pub(crate) state: Option<StateOption>,
    pub(crate) defer: bool,
}

pub(crate) fn body(cursor: &mut Cursor<'_, '_>) -> Parse<WholeBody> {
    let mut whole = WholeBody::default();
    if cursor.peek().is_none() && cursor.comment().is_none() {
        return Err(Fault::new(cursor.here(), "the protocol is missing")
            .hint("\"ip from any to any\" matches every packet"));
    }
    whole.body.form = form(cursor)?;
    if whole.body.form != Form::Options {
        whole.body.proto = block(cursor, |cursor| protocol(cursor).map(Test::Proto))?;
    }
    if whole.body.form == Form::Full {
        from_to(cursor, &mut whole.body)?;
    }
    options(cursor, &mut whole)?;
    canonical(&mut whole.body);
    Ok(whole)
}

/// Determines the form of the body from its first words.
fn form(cursor: &mut Cursor<'_, '_>) -> Parse<Form> {
    let mut ahead = 0;
    while matches!(cursor.peek_at(ahead), Some("{" | "not" | "!")) {
        ahead += 1;
    }
    let Some(word) = cursor.peek_at(ahead) else { return Ok(Form::Options) };
    if Protocol::parse(word).is_none() && is_option(word) {
        return Ok(Form::Options);
    }
    // The protocol ends at `from`; without `from` the rule consists of options only.
    let closes =
        |word: &str| matches!(word, "}" | "or" | "not" | "!" | "{") || Protocol::parse(word).is_some();
    let mut end = ahead + 1;
    while cursor.peek_at(end).is_some_and(closes) {
        end += 1;
    }
    match cursor.peek_at(end) {
        None => Ok(Form::Proto),
        Some(next) if is_option(next) && next != "from" => Ok(Form::Proto),
        _ => Ok(Form::Full),
    }
}

fn is_option(word: &str) -> bool {
    option::words().any(|option| option == word) || NO_OPTIONS.iter().any(|(w, ..)| *w == word)
}

fn protocol(cursor: &mut Cursor<'_, '_>) -> Parse<Protocol> {
    let token = cursor.need("the protocol")?;
    Protocol::parse(&token.text).ok_or_else(|| {
        if let "from" | "any" = &*token.text {
            return Fault::new(
                token.position(),
                format!("{} found, expected a protocol", quoted(&token.text)),
            )
            .hint("\"ip\" matches any protocol");
        }
        Fault::new(token.position(), format!("unknown protocol {}", quoted(&token.text)))
            .did_you_mean(&token.text, Protocol::names().chain(option::words()))
    })
}

/// Parses `{ not a or b }`, or a single test.
fn block(
    cursor: &mut Cursor<'_, '_>,
    mut test: impl FnMut(&mut Cursor<'_, '_>) -> Parse<Test>,
) -> Parse<Block> {
    let open = cursor.here();
    if !cursor.eat("{") {
        return Ok(vec![term(cursor, &mut test)?]);
    }
    let mut terms = Vec::new();
    loop {
        if cursor.peek() == Some("{") {
            return Err(Fault::new(cursor.here(), "nested or-block"));
        }
        terms.push(term(cursor, &mut test)?);
        if cursor.eat("}") {
            return Ok(terms);
        }
        if !cursor.eat("or") {
            return Err(match cursor.peek() {
                Some(word) => {
                    Fault::new(cursor.here(), format!("expected \"or\" or \"}}\", found {}", quoted(word)))
                }
                None => Fault::new(open, "the or-block is not closed").hint("add \"}\""),
            });
        }
    }
}

/// Parses one test, optionally negated.
fn term(
    cursor: &mut Cursor<'_, '_>,
    test: &mut impl FnMut(&mut Cursor<'_, '_>) -> Parse<Test>,
) -> Parse<Term> {
    let at = cursor.here();
    let not = not(cursor)?;
    let test = test(cursor)?;
    let any = match &test {
        Test::Proto(Protocol::Any) => true,
        Test::Src(list) | Test::Dst(list) => list[..] == [Address::Any],
        _ => false,
    };
    // After a fault, `any` may stand for an address that could not be parsed.
    if not && any && cursor.fine() {
        return Err(Fault::new(at, "the negation of a test that always matches never matches")
            .hint("remove the rule"));
    }
    Ok(Term { not, test })
}

fn not(cursor: &mut Cursor<'_, '_>) -> Parse<bool> {
    let one = |cursor: &mut Cursor<'_, '_>| cursor.eat("not") || cursor.eat("!");
    if !one(cursor) {
        return Ok(false);
    }
    let at = cursor.here();
    if one(cursor) { Err(Fault::new(at, "duplicate \"not\"")) } else { Ok(true) }
}

fn from_to(cursor: &mut Cursor<'_, '_>, body: &mut Body) -> Parse<()> {
    keyword(cursor, "from")?;
    body.src = block(cursor, |cursor| addresses(cursor, "the source address").map(Test::Src))?;
    body.src_port = port_term(cursor, Test::SrcPort)?;
    keyword(cursor, "to")?;
    body.dst = block(cursor, |cursor| addresses(cursor, "the destination address").map(Test::Dst))?;
    body.dst_port = port_term(cursor, Test::DstPort)?;
    Ok(())
}

fn keyword(cursor: &mut Cursor<'_, '_>, word: &str) -> Parse<()> {
    if cursor.eat(word) {
        return Ok(());
    }
    let at = cursor.here();
    match cursor.peek() {
        None => Err(Fault::new(at, format!("\"{word}\" is missing"))),
        // A typing error: record it, and continue as if the word were correct.
        Some(found) if nearest(found, [word]).is_some() || sorted(found) == sorted(word) => {
            let message = format!("expected \"{word}\", found {}", quoted(found));
            cursor.note(Fault::new(at, message).hint(format!("did you mean \"{word}\"?")));
            cursor.take();
            Ok(())
        }
        Some(found) => Err(Fault::new(at, format!("expected \"{word}\", found {}", quoted(found)))),
    }
}

fn sorted(word: &str) -> Vec<u8> {
    let mut letters = word.as_bytes().to_vec();
    letters.truncate(8);
    letters.sort_unstable();
    letters
}

/// Parses the optional ports after an address; `None` if the next word is something else.
fn port_term(cursor: &mut Cursor<'_, '_>, test: fn(Ranges) -> Test) -> Parse<Option<Term>> {
    let negated = matches!(cursor.peek(), Some("not" | "!"));
    // `from any src-port 53 to any`: the superfluous word is harmless.
    if !negated && matches!(test(Ranges::default()), Test::SrcPort(_)) && cursor.eat("src-port") {
        let token = cursor.need("the ports")?;
        return Ok(Some(Term { not: false, test: test(ranges(cursor, token, "port", ports::port)) }));
    }
    let Some(word) = cursor.peek_at(usize::from(negated)) else { return Ok(None) };
    // All ports: no test, as in ipfw.
    if word == "any" && !negated {
        cursor.take();
        return Ok(None);
    }
    let first = word.split([',', '-']).next().unwrap_or_default();
    let numeric = first.starts_with(|c: char| c.is_ascii_digit());
    let named = ports::port(word.split(',').next().unwrap_or_default()).is_some()
        || ports::port(first).is_some()
        || word.contains("\\-")
        // No option contains a comma: report errors per element.
        || word.contains(',');
    if is_option(word) || !(numeric || named) {
        return Ok(None);
    }
    if negated {
        cursor.take();
    }
    let token = cursor.need("the ports")?;
    let ranges = ranges(cursor, token, "port", ports::port);
    Ok(Some(Term { not: negated, test: test(ranges) }))
}

fn options(cursor: &mut Cursor<'_, '_>, whole: &mut WholeBody) -> Parse<()> {
    let mut lifetime = None;
    let mut tracking = None;
    let mut offload = None;
    while let Some(word) = cursor.peek().filter(|_| !cursor.full()) {
        let at = cursor.here();
        let result = match word {
            "keep-state" | "record-state" | "limit" | "set-limit" => {
                state::state(cursor).and_then(|state| match whole.state.replace(state) {
                    None => Ok(()),
                    Some(_) => Err(Fault::new(
                        at,
                        "a rule may have only one of keep-state, record-state, limit and set-limit",
                    )),
                })
            }
            "defer-action" | "defer-immediate-action" => {
                cursor.take();
                whole.defer = true;
                Ok(())
            }
            "lifetime" => {
                cursor.take();
                match cursor.number("lifetime in seconds", 1, LIFETIME_MAX) {
                    Ok(_) if lifetime.is_some() => Err(Fault::new(at, "duplicate \"lifetime\"")),
                    Ok(seconds) => {
                        lifetime = Some((seconds, at));
                        Ok(())
                    }
                    Err(fault) => Err(fault),
                }
            }
            "offload" => {
                cursor.take();
                match offload.replace(at) {
                    Some(_) => Err(Fault::new(at, "duplicate \"offload\"")),
                    None => Ok(()),
                }
            }
            "strict" | "loose" => {
                cursor.take();
                let kind = if word == "strict" { Tracking::Strict } else { Tracking::Loose };
                match tracking.replace((kind, word, at)) {
                    Some((_, before, _)) if before == word => {
                        Err(Fault::new(at, format!("duplicate \"{word}\"")))
                    }
                    Some(_) => Err(Fault::new(at, "a rule may have only one of strict and loose")),
                    None => Ok(()),
                }
            }
            _ => block(cursor, option::test).map(|block| whole.body.options.push(block)),
        };
        if let Err(fault) = result {
            cursor.note(fault);
            skip_to_option(cursor);
        }
    }
    let needs_state = |word: &str, at| {
        Err(Fault::new(at, format!("\"{word}\" needs keep-state, record-state, limit or set-limit")))
    };
    match (&mut whole.state, lifetime, tracking) {
        (None, Some((_, at)), _) => needs_state("lifetime", at),
        (None, _, Some((_, word, at))) => needs_state(word, at),
        (None, ..) if let Some(at) = offload => needs_state("offload", at),
        (None, ..) if whole.defer => needs_state("defer-action", cursor.here()),
        (None, ..) => Ok(()),
        (Some(state), lifetime, tracking) => {
            state.lifetime = lifetime.map(|(seconds, _)| seconds);
            state.offload = offload.is_some();
            state.tracking = tracking.map_or(Tracking::Ipfw, |(kind, ..)| kind);
            Ok(())
        }
    }
}

/// After a bad option: skips to the next word that is certainly an option, so that its faults are found too.
fn skip_to_option(cursor: &mut Cursor<'_, '_>) {
    while let Some(word) = cursor.peek() {
        let starts_block = word == "{" && cursor.peek_at(1).is_some_and(is_option);
        if is_option(word) || starts_block {
            return;
        }
        cursor.take();
    }
}

/// Rewrites `dst-port 80` after `to any` as `to any 80`, so that equal rules print equally.
fn canonical(body: &mut Body) {
    if body.form != Form::Full {
        return;
    }
    let lone_ports = |block: &Block, source: bool| match &block[..] {
        [Term { test: Test::SrcPort(_), .. }] => source,
        [Term { test: Test::DstPort(_), .. }] => !source,
        _ => false,
    };
    for (source, place) in [(true, &mut body.src_port), (false, &mut body.dst_port)] {
        if place.is_none()
            && let Some(at) = body.options.iter().position(|block| lone_ports(block, source))
        {
            *place = body.options.remove(at).pop();
        }
    }
}
