//! The terminal: keys in, the model's lines out. The threads that read the keys and the engine send what they have to this one.

use std::io::{self, IsTerminal, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::style::{Color, Modifier, Style as Look};
use ratatui::text::{Line as Drawn, Text};
use serde_json::Value;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::model::{Command, Key, Line, Model, Style, Wanted};
use super::reader::{Pace, Reader};
use super::sample::Sample;
use super::trace::TraceLines;
use crate::control::client::{Engine, Failure, Message};
use crate::exit;

/// Inputs that may wait. A trace that is faster than the terminal waits here, and the engine counts what it leaves out.
const INPUTS: usize = 64;

/// What happens.
enum Input {
    Key(Key),
    Resize,
    Sample(Sample),
    Gone(String),
    Message(String),
    /// Lines of the trace with this number.
    Trace(u64, Vec<String>),
    TraceEnd(u64, String),
    Quit,
}

/// Runs the view until a key or a signal ends it.
///
/// # Errors
///
/// Fails if standard input or output is no terminal, or the terminal fails.
pub(super) fn run(engine: Engine, interval: Duration) -> Result<(), Failure> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        let message = "top needs a terminal; `towpath top --once` prints one sample to a file or a pipe";
        return Err(Failure::new(exit::USAGE, message));
    }
    let failed = |error: io::Error| Failure::new(exit::FAILED, format!("the terminal: {error}"));
    let mut model = Model::new(&engine.socket().display().to_string(), interval.as_secs_f64());
    let (inputs, happens) = sync_channel(INPUTS);
    signals(inputs.clone()).map_err(failed)?;
    let (commands, ordered) = channel();
    let reader = Reader::new(engine);
    let to = inputs.clone();
    thread::spawn(move || read(reader, interval, &ordered, &to));
    // Restores the terminal also if the program panics.
    let mut terminal = ratatui::try_init().map_err(failed)?;
    thread::spawn(move || keys(&inputs));
    let ended = show(&mut model, &mut terminal, &happens, &commands);
    ratatui::restore();
    ended.map_err(failed)
}

fn show(
    model: &mut Model,
    terminal: &mut ratatui::DefaultTerminal,
    happens: &Receiver<Input>,
    commands: &Sender<Order>,
) -> io::Result<()> {
    // The number of the trace that is shown: lines of an earlier one may still arrive.
    let mut trace = 0;
    while !model.is_over() {
        while let Some(command) = model.poll_command() {
            if matches!(command, Command::Trace(_) | Command::StopTrace) {
                trace += 1;
            }
            // The thread ends with the process only.
            let _ = commands.send(Order { command, trace });
        }
        terminal.draw(|frame| draw(frame, model))?;
        // Everything that waits is taken before the next drawing.
        let Ok(first) = happens.recv() else { return Ok(()) };
        for input in std::iter::once(first).chain(happens.try_iter().take(INPUTS)) {
            match input {
                Input::Key(key) => model.handle_key(key),
                // The next drawing asks for the size.
                Input::Resize => {}
                Input::Sample(sample) => model.handle_sample(sample),
                Input::Gone(why) => model.handle_gone(&why),
                Input::Message(message) => model.handle_message(&message),
                Input::Trace(number, lines) if number == trace => model.handle_trace(lines),
                Input::TraceEnd(number, why) if number == trace => model.handle_trace_end(&why),
                Input::Trace(..) | Input::TraceEnd(..) => {}
                Input::Quit => return Ok(()),
            }
        }
    }
    Ok(())
}

fn draw(frame: &mut Frame<'_>, model: &mut Model) {
    let area = frame.area();
    let lines = model.lines(area.width.into(), area.height.into());
    let lines: Vec<Drawn<'_>> = lines.into_iter().map(|line| drawn(line, area.width.into())).collect();
    frame.render_widget(Text::from(lines), area);
}

fn drawn(line: Line, width: usize) -> Drawn<'static> {
    let Line { text, style } = line;
    let look = match style {
        Style::Plain => Look::default(),
        Style::Bold => Look::default().add_modifier(Modifier::BOLD),
        Style::Header => Look::default().add_modifier(Modifier::UNDERLINED),
        Style::Selected | Style::Help => Look::default().add_modifier(Modifier::REVERSED),
        Style::Alert => Look::default().fg(Color::Red).add_modifier(Modifier::BOLD),
    };
    // A background reaches to the right border.
    Drawn::styled(format!("{text:<width$}"), look)
}

/// Reads keys until the terminal is closed.
fn keys(inputs: &SyncSender<Input>) {
    loop {
        let input = match event::read() {
            Ok(Event::Key(key)) if key.kind != KeyEventKind::Release => match key_of(key) {
                Some(key) => Input::Key(key),
                None => continue,
            },
            Ok(Event::Resize(..)) => Input::Resize,
            Ok(_) => continue,
            Err(_) => Input::Quit,
        };
        let over = matches!(input, Input::Quit);
        if inputs.send(input).is_err() || over {
            return;
        }
    }
}

fn key_of(key: KeyEvent) -> Option<Key> {
    Some(match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Key::Interrupt,
        KeyCode::Char(_) if key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) => {
            return None;
        }
        KeyCode::Char(c) => Key::Char(c),
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::Left | KeyCode::BackTab => Key::Left,
        KeyCode::Right | KeyCode::Tab => Key::Right,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        _ => return None,
    })
}

/// Ends the view by signals, so that the terminal is restored.
fn signals(inputs: SyncSender<Input>) -> io::Result<()> {
    let (mut pipe, write) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    thread::spawn(move || {
        if pipe.read_exact(&mut [0]).is_ok() {
            let _ = inputs.send(Input::Quit);
        }
    });
    Ok(())
}

/// A command with the number of the trace that is shown after it.
struct Order {
    command: Command,
    trace: u64,
}

/// Reads samples and carries out commands.
fn read(mut reader: Reader, interval: Duration, orders: &Receiver<Order>, inputs: &SyncSender<Input>) {
    let (mut wanted, mut pace) = (Wanted::default(), Pace::new(interval));
    let mut traced: Option<UnixStream> = None;
    loop {
        let wait = if wanted.running { pace.left() } else { Duration::MAX };
        match orders.recv_timeout(wait) {
            Ok(Order { command: Command::Read(next), .. }) => {
                if next.running {
                    pace.hurry();
                }
                wanted = next;
            }
            Ok(Order { command: Command::End(flow), .. }) => {
                if inputs.send(Input::Message(reader.end(&flow))).is_err() {
                    return;
                }
                pace.hurry();
            }
            Ok(Order { command: Command::Trace(request), trace }) => {
                stop(traced.take());
                traced = begin(&reader, &request, trace, inputs);
            }
            Ok(Order { command: Command::StopTrace, .. }) => stop(traced.take()),
            Err(RecvTimeoutError::Timeout) => {
                let input = match reader.read(&wanted) {
                    Ok(sample) => Input::Sample(sample),
                    Err(failure) => Input::Gone(failure.message),
                };
                if inputs.send(input).is_err() {
                    return;
                }
                pace.taken();
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Begins a trace; its lines come from a thread of its own. Returns the socket that ends it.
fn begin(reader: &Reader, request: &Value, number: u64, inputs: &SyncSender<Input>) -> Option<UnixStream> {
    let failed = |failure: Failure| {
        let _ = inputs.send(Input::TraceEnd(number, failure.message));
    };
    let mut connection = reader.trace(request).map_err(failed).ok()?;
    let socket = connection.socket().map_err(failed).ok()?;
    let inputs = inputs.clone();
    thread::spawn(move || {
        let mut lines = TraceLines::default();
        loop {
            let input = match connection.message() {
                Ok(Message::Capture(blocks)) => Input::Trace(number, lines.take(blocks)),
                Ok(Message::Answer(answer)) => {
                    let why = answer.body["why"].as_str().unwrap_or("by the engine").to_owned();
                    Input::TraceEnd(number, why)
                }
                Err(failure) => Input::TraceEnd(number, failure.message),
            };
            let over = matches!(input, Input::TraceEnd(..));
            if inputs.send(input).is_err() || over {
                return;
            }
        }
    });
    Some(socket)
}

fn stop(socket: Option<UnixStream>) {
    if let Some(socket) = socket {
        // The engine may have closed it.
        let _ = socket.shutdown(Shutdown::Both);
    }
}
