//! `towpath_framing_*`: framings of a mux from a text, a TOML document, a BPF object, or a function of C.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use rustix::io::Errno;
use towpath_mux::framing::{Cause, Custom, Framing as Inner, Message, State, Step};

use crate::error::{Failure, guard};
use crate::ffi::{Bytes, Context, Release, Text};

/// `towpath_framing`.
#[derive(Debug)]
pub struct Framing {
    pub(crate) framing: Inner,
}

/// `struct towpath_framing_state`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct FramingState {
    /// Number of messages framed on the connection.
    pub messages: u64,
    /// Bytes needed to know more, if the function returns 0.
    pub need: usize,
    /// Bytes at the start of the message that are not payload.
    pub skip: usize,
    /// Bytes at its end that are not payload.
    pub trim: usize,
    /// A mark for the worker.
    pub mark: u32,
    /// A hash for the order by key.
    pub hash: u32,
    /// State of the connection.
    pub cb: [u32; 5],
    /// 0.
    pub reserved: u32,
}

/// `towpath_framer`.
pub type Framer = extern "C" fn(*const u8, usize, &mut FramingState, *mut c_void) -> i64;

/// "Not for the mux" (include/uapi/asm-generic/errno.h; net/strparser/strparser.c).
const ESTRPIPE: i64 = 86;

thread_local! {
    /// This thread is in a [`Framer`], below the lock of a mux.
    static FRAMES: Cell<bool> = const { Cell::new(false) };
}

/// Fails in a [`Framer`]: a call on its mux would wait for itself.
pub(crate) fn not_in_a_framer() -> Result<(), Failure> {
    match FRAMES.get() {
        true => Err(Failure::new(Errno::DEADLK, "a function of a framing must not use a mux")),
        false => Ok(()),
    }
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_framing_parse(
    text: Text,
    framing: Option<&mut MaybeUninit<*mut Framing>>,
) -> c_int {
    guard(|| give(framing, parsed(&text)?.ok_or(NULL_TEXT)?))
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_framing_toml(
    document: Text,
    framing: Option<&mut MaybeUninit<*mut Framing>>,
) -> c_int {
    guard(|| {
        let document = document.get().ok_or(NULL_TEXT)?.to_string_lossy();
        let parsed = Inner::from_toml(&document);
        give(framing, parsed.map_err(|error| Failure::new(Errno::INVAL, error.to_string()))?)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_framing_program(
    object: Bytes,
    len: usize,
    name: Text,
    framing: Option<&mut MaybeUninit<*mut Framing>>,
) -> c_int {
    guard(|| {
        let name = name.get().map(|name| name.to_string_lossy().into_owned());
        let program = Inner::load_program(object.get(len)?, name);
        give(framing, program.map_err(|error| Failure::new(Errno::INVAL, error.to_string()))?)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_framing_function(
    framer: Option<Framer>,
    context: *mut c_void,
    release: Option<Release>,
    framing: Option<&mut MaybeUninit<*mut Framing>>,
) -> c_int {
    guard(|| {
        let framer = framer.ok_or(Failure::null("the function is NULL"))?;
        let into = framing.ok_or(NULL_OUTPUT)?;
        let function = Function { framer, context: Context::new(context, release) };
        give(Some(into), Inner::custom("a function", function))
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_framing_close(framing: Option<Box<Framing>>) {
    guard(|| {
        drop(framing);
        Ok(0)
    });
}

const NULL_TEXT: Failure = Failure::null("the text is NULL");
const NULL_OUTPUT: Failure = Failure::null("the pointer to the framing is NULL");

/// Parses a preset or clauses; `None` for NULL.
pub(crate) fn parsed(text: &Text) -> Result<Option<Inner>, Failure> {
    let Some(text) = text.get() else { return Ok(None) };
    let framing = Inner::parse(&text.to_string_lossy());
    framing.map(Some).map_err(|error| Failure::new(Errno::INVAL, error.to_string()))
}

fn give(into: Option<&mut MaybeUninit<*mut Framing>>, framing: Inner) -> Result<c_int, Failure> {
    into.ok_or(NULL_OUTPUT)?.write(Box::into_raw(Box::new(Framing { framing })));
    Ok(0)
}

/// A framing function of C.
struct Function {
    framer: Framer,
    context: Context,
}

impl Custom for Function {
    fn step(&self, bytes: &[u8], state: &mut State) -> Step {
        let mut of_c = FramingState { messages: state.messages, cb: state.cb, ..FramingState::default() };
        FRAMES.set(true);
        let result = (self.framer)(bytes.as_ptr(), bytes.len(), &mut of_c, self.context.pointer());
        FRAMES.set(false);
        let FramingState { need, skip, trim, mark, hash, cb, .. } = of_c;
        state.cb = cb;
        match result {
            0 => Step::Need(need),
            length @ 1.. => match usize::try_from(length) {
                Ok(length) => Step::Message(Message { length, skip, trim, mark, hash }),
                Err(_) => Step::Error(Cause::TooBig { length: Some(length as u64), max: usize::MAX as u64 }),
            },
            errno if errno == -ESTRPIPE => Step::GiveBack,
            errno => Step::Error(Cause::Program(i32::try_from(errno.unsigned_abs()).unwrap_or(i32::MAX))),
        }
    }
}
