//! The live view: draws the status on a terminal, into a recording, or both.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, IsTerminal, Stderr, Write};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ratatui::backend::CrosstermBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen};
use ratatui::crossterm::{cursor, terminal};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Sparkline, Wrap};
use ratatui::{Frame, Terminal, TerminalOptions, Viewport};

use super::asciicast::Asciicast;
use super::digits::thousands;
use super::keys::{Key, Keys};
use super::status::{Shown, State, Status};
use super::{Failure, Stop, doing};

/// Interval between two frames.
const REST: Duration = Duration::from_millis(100);
/// Size of a recording without a terminal, and the maximum size on a terminal.
const SCREEN: (u16, u16) = (120, 38);
/// Columns of a scene's name.
const NAME: usize = 22;
/// Minimum size.
const LEAST: (u16, u16) = (80, 24);

/// The view's thread; draws until told to stop.
#[derive(Debug)]
pub(super) struct View {
    over: Arc<AtomicBool>,
    thread: JoinHandle<io::Result<Seen>>,
}

/// The view's output.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) cast: Asciicast,
    /// The last frame.
    pub(super) screen: Buffer,
}

/// The drawing targets.
struct Paper {
    terminal: Option<Stderr>,
    cast: Rc<RefCell<Asciicast>>,
}

impl View {
    /// Returns true if standard error is a terminal of sufficient size.
    pub(super) fn fits() -> bool {
        io::stderr().is_terminal()
            && terminal::size().is_ok_and(|(width, height)| width >= LEAST.0 && height >= LEAST.1)
    }

    /// Starts drawing, on the terminal if `on_terminal` is set, and always into the recording.
    /// On a terminal it also reads keys; `q` ends the demo by `stop`.
    pub(super) fn start(status: &Status, stop: &Stop, on_terminal: bool) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (status, stop, until) = (status.clone(), stop.clone(), Arc::clone(&over));
        let thread = thread::spawn(move || draw_until(&status, &stop, on_terminal, &until));
        Self { over, thread }
    }

    /// Draws a last time and restores the terminal.
    pub(super) fn end(self) -> Result<Seen, Failure> {
        // Relaxed: the status is synchronised by its lock.
        self.over.store(true, Ordering::Relaxed);
        let seen = self.thread.join().map_err(|_| Failure::Broken("the view panicked".into()))?;
        seen.map_err(doing("the view"))
    }
}

fn draw_until(status: &Status, stop: &Stop, on_terminal: bool, over: &AtomicBool) -> io::Result<Seen> {
    let (mut width, mut height) = SCREEN;
    if on_terminal {
        let size = terminal::size()?;
        (width, height) = (width.min(size.0), height.min(size.1));
    }
    // Shared with the backend, which hides its writer. Only one thread uses both.
    let cast = Rc::new(RefCell::new(Asciicast::new(width, height)));
    let paper = Paper { terminal: on_terminal.then(io::stderr), cast: Rc::clone(&cast) };
    let viewport = Viewport::Fixed(Rect::new(0, 0, width, height));
    let mut terminal = Terminal::with_options(CrosstermBackend::new(paper), TerminalOptions { viewport })?;
    if on_terminal {
        execute!(io::stderr(), EnterAlternateScreen, cursor::Hide)?;
    }
    let keys = if on_terminal { Keys::open() } else { None };
    status.shown().keys = keys.is_some();
    let drawn = pictures(status, &mut terminal, &cast, over, || {
        while let Some(key) = keys.as_ref().and_then(Keys::next) {
            match key {
                Key::Kill => status.shown().asked_for.kill = true,
                Key::Flood => status.shown().asked_for.flood = true,
                Key::Quit => stop.set(),
            }
        }
    });
    drop(keys);
    if on_terminal {
        // Restoring a closed terminal fails harmlessly.
        let _ = execute!(io::stderr(), LeaveAlternateScreen, cursor::Show);
    }
    let screen = drawn?;
    drop(terminal);
    let cast = Rc::into_inner(cast).expect("the terminal is gone").into_inner();
    Ok(Seen { cast, screen })
}

/// Draws until `over` is set, and once more.
fn pictures(
    status: &Status,
    terminal: &mut Terminal<CrosstermBackend<Paper>>,
    cast: &RefCell<Asciicast>,
    over: &AtomicBool,
    read_keys: impl Fn(),
) -> io::Result<Buffer> {
    loop {
        read_keys();
        let last = over.load(Ordering::Relaxed);
        let shown = status.shown().clone();
        let screen = terminal.draw(|frame| picture(frame, &shown))?.buffer.clone();
        cast.borrow_mut().cut();
        if last {
            return Ok(screen);
        }
        thread::sleep(REST);
    }
}

/// Draws the screen. From top to bottom: headline, diagram, scenes, rules if there is room, and a lower part that shows the
/// comparison as soon as there is one. The last row names the keys.
fn picture(frame: &mut Frame<'_>, shown: &Shown) {
    let scenes = shown.scenes.len() as u16 + 2;
    let title = match shown.scenes.iter().any(|scene| scene.starred) {
        true => "scenes (*: the kernel's path has no equivalent)",
        false => "scenes",
    };
    let list = || Paragraph::new(shown.scenes.iter().map(scene).collect::<Vec<_>>()).block(boxed(title));
    if !shown.hosts {
        let rows =
            [Constraint::Length(1), Constraint::Length(scenes), Constraint::Fill(1), Constraint::Length(1)];
        let [head, top, bottom, foot] = Layout::vertical(rows).areas(frame.area());
        frame.render_widget(headline(shown), head);
        frame.render_widget(list(), top);
        frame.render_widget(events(shown, bottom), bottom);
        frame.render_widget(keys(shown), foot);
        return;
    }
    // The lower boxes have 8 rows; the rules get the rest, at most one row each.
    let room = frame.area().height.saturating_sub(4 + scenes);
    let rules = (shown.rules.len().max(4) as u16 + 2).min(room.saturating_sub(8));
    // With less room, the rules share the lower part.
    let rules = if rules < 6 { 0 } else { rules };
    let [head, wires, top, middle, bottom, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(2),
        Constraint::Length(scenes),
        Constraint::Length(rules),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(headline(shown), head);
    frame.render_widget(map(shown), wires);
    frame.render_widget(list(), top);
    frame.render_widget(keys(shown), foot);
    if rules > 0 {
        let rows = rules_of(shown, middle, false);
        frame.render_widget(Paragraph::new(rows).block(boxed("rules, with their packets")), middle);
    }
    if !shown.vs_kernel.is_empty() {
        frame.render_widget(Paragraph::new(vs_kernel(shown)).block(boxed("one sender, end to end")), bottom);
        return;
    }
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(bottom);
    if rules > 0 {
        curves_of(frame, shown, left);
    } else {
        frame.render_widget(Paragraph::new(rules_of(shown, left, true)).block(boxed("rules")), left);
    }
    frame.render_widget(events(shown, right), right);
}

/// The last events, as many as the box has rows.
fn events(shown: &Shown, area: Rect) -> Paragraph<'_> {
    let rows = area.height.saturating_sub(2) as usize;
    let left_out = shown.news.len().saturating_sub(rows);
    let lines: Vec<Line<'_>> =
        shown.news.iter().skip(left_out).map(|line| Line::raw(line.as_str())).collect();
    Paragraph::new(lines).wrap(Wrap { trim: false }).block(boxed("events"))
}

fn keys(shown: &Shown) -> Line<'_> {
    let key = |name: &'static str| name.black().on_gray();
    match (shown.keys, shown.hosts) {
        (false, _) => Line::raw(""),
        (true, false) => Line::from(vec![key(" q "), Span::raw(" quit")]),
        (true, true) => Line::from(vec![
            key(" k "),
            Span::raw(" kill an inspector   "),
            key(" f "),
            Span::raw(" SYN flood   "),
            key(" q "),
            Span::raw(" quit"),
        ]),
    }
}

fn boxed(title: &str) -> Block<'_> {
    Block::bordered().title(title.bold()).border_style(Style::new().fg(Color::DarkGray))
}

fn headline(shown: &Shown) -> Line<'_> {
    let end = match shown.ended {
        None => {
            let rate = |points: &VecDeque<u64>| thousands(points.back().copied().unwrap_or(0));
            let (passed, dropped) = (rate(&shown.passed), rate(&shown.dropped));
            let rates = format!("  passed {passed}/s, dropped {dropped}/s");
            if shown.passed.is_empty() { Span::raw("") } else { Span::raw(rates) }
        }
        Some(true) => " every expectation was met ".black().on_green(),
        Some(false) => " an expectation was not met ".white().on_red(),
    };
    Line::from(vec![
        " towpath demo ".black().on_cyan().bold(),
        format!(" {:4.1} s  ", shown.begun.elapsed().as_secs_f64()).bold(),
        Span::raw(shown.place.as_str()).dark_gray(),
        Span::raw(" "),
        end,
    ])
}

/// The diagram of hosts and links.
fn map(shown: &Shown) -> Paragraph<'_> {
    let workers: Vec<String> =
        shown.workers.iter().map(|(pid, messages, _)| format!("{pid}: {}", thousands(*messages))).collect();
    let middle = match workers.is_empty() {
        true => "for comparison: the kernel's path".to_owned(),
        false => format!("workers {}", workers.join(", ")),
    };
    let wire = || " ══ ".dark_gray();
    Paragraph::new(vec![
        Line::from(vec![
            " clients, attackers".green(),
            wire(),
            "[wan  TOWPATH: gate, inspector  lan]".cyan().bold(),
            wire(),
            "servers, workers".green(),
        ]),
        Line::from(format!("  10.77.0.1           {middle:<38}10.77.0.2").dark_gray()),
    ])
}

fn scene(scene: &super::status::Scene) -> Line<'_> {
    let star = if scene.starred { "*" } else { " " };
    let sign = match scene.state {
        State::Waits => "  ".dark_gray(),
        State::Plays => "> ".yellow().bold(),
        State::Over(true) => "ok".green().bold(),
        State::Over(false) => "NO".red().bold(),
    };
    let name = match scene.state {
        State::Waits => scene.name.dark_gray(),
        State::Plays => scene.name.yellow().bold(),
        State::Over(_) => scene.name.bold(),
    };
    let space = " ".repeat(NAME.saturating_sub(scene.name.len()));
    Line::from(vec![sign, Span::raw(star), name, Span::raw(space), Span::raw(scene.line.as_str())])
}

/// The rules that fit. With `short`, only those that matched, and without their text.
fn rules_of(shown: &Shown, area: Rect, short: bool) -> Vec<Line<'_>> {
    let rows = area.height.saturating_sub(2) as usize;
    // Rules that do not fit are at the end, such as the default rule.
    let matched = |(_, packets, text): &&(u64, u64, String)| !short || *packets > 0 && text.contains(" // ");
    shown.rules.iter().filter(matched).take(rows).map(|row| rule(row, short)).collect()
}

fn rule((number, packets, text): &(u64, u64, String), short: bool) -> Line<'_> {
    let count = format!("{:>9} ", thousands(*packets));
    let count = match (*packets, text.starts_with("deny")) {
        (0, _) => count.dark_gray(),
        (_, true) => count.red().bold(),
        _ => count.green(),
    };
    let (rule, comment) = text.split_once(" // ").unwrap_or((text, ""));
    let rule = if short { String::new() } else { rule.replace(" :default", "") };
    let number = format!("{number:05}").dark_gray();
    Line::from(vec![number, count, format!("{comment:<26}").yellow(), Span::raw(rule)])
}

fn curves_of(frame: &mut Frame<'_>, shown: &Shown, area: Rect) {
    let [passed, dropped] = Layout::vertical([Constraint::Fill(1), Constraint::Fill(1)]).areas(area);
    let rows =
        [("passed", &shown.passed, Color::Green, passed), ("dropped", &shown.dropped, Color::Red, dropped)];
    for (name, points, colour, area) in rows {
        let width = area.width.saturating_sub(2) as usize;
        let newest: Vec<u64> = points.iter().copied().skip(points.len().saturating_sub(width)).collect();
        let title = format!("{name}: {} packets/s", thousands(points.back().copied().unwrap_or(0)));
        let curve = Sparkline::default().data(newest).style(Style::new().fg(colour));
        frame.render_widget(curve.block(boxed(&title)), area);
    }
}

fn vs_kernel(shown: &Shown) -> Vec<Line<'_>> {
    let ours = shown.vs_kernel.first().map(|row| row.ours.as_slice()).unwrap_or_default();
    let mut head = format!("{:<30}{:>8}", "", "kernel");
    ours.iter().for_each(|ours| head += &format!(" {:>9}{:>9}", ours.driver, "ratio"));
    let mut lines = vec![Line::from(head.dark_gray())];
    lines.extend(shown.vs_kernel.iter().map(|row| {
        let mut line = vec![Span::raw(format!("{:<30}{:>8.1}", row.name, row.kernel.value))];
        for ours in &row.ours {
            let better = (ours.ratio >= 1.0) != row.lower_is_better;
            let ratio = format!("{:>7.2} x", ours.ratio);
            line.push(format!(" {:>9.1}", ours.figure.value).cyan());
            line.push(if better { ratio.green().bold() } else { ratio.yellow() });
        }
        Line::from(line)
    }));
    lines.push(Line::from(shown.machine.as_str().dark_gray()));
    lines
}

impl Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A closed terminal ends the drawing, not the recording.
        if self.terminal.as_mut().is_some_and(|terminal| terminal.write_all(bytes).is_err()) {
            self.terminal = None;
        }
        self.cast.borrow_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.terminal.as_mut().is_some_and(|terminal| terminal.flush().is_err()) {
            self.terminal = None;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::status::Status;
    use super::{LEAST, picture};

    /// The lines of a scene's result at their longest, as `director.rs` writes them.
    const LINES: [(&str, &str); 9] = [
        ("clients", "123,456 requests, 123,456 queries: all answered"),
        ("inspector killed", "450,000 lines, 0/45,000 secrets leaked, back in 50 ms"),
        ("reload in a SYN flood", "199,999 SYNs, 50 admitted; 40 reloads; 12,345 answers"),
        ("live trace", "1,234 packets with verdict: 1,200 passed, 34 dropped"),
        ("port scan", "999 ports tried, 0 open; rule 800 dropped 999"),
        ("source over its limit", "20 connections tried, 8 admitted; rule 500 dropped 36"),
        ("worker killed", "180,345 of 180,345 answered, 4 redelivered, 0 lost"),
        ("file sent", "512.0 MiB at 12.34 GiB/s, intact; this path copies"),
        ("the kernel's path", "5 kinds of traffic measured on both paths"),
    ];

    #[test]
    fn everything_is_visible_in_80_columns_and_24_lines() {
        let names = LINES.map(|(name, _)| name);
        let status = Status::new(&names, &names[1..4], false);
        for (name, line) in LINES {
            status.over(name, true, line.to_owned());
        }
        {
            let mut shown = status.shown();
            shown.hosts = true;
            shown.keys = true;
            shown.place = "without root".into();
            shown.passed.push_back(123_456);
            shown.dropped.push_back(123_456);
            shown.rules = (1..8)
                .map(|number| (number * 100, 1_234_567, format!("deny ip from any to any // rule {number}")))
                .collect();
            shown.news.push_back(":12345 > :80 500: drop, over_limit".into());
        }
        let mut terminal = Terminal::new(TestBackend::new(LEAST.0, LEAST.1)).unwrap();
        terminal.draw(|frame| picture(frame, &status.shown())).unwrap();
        let screen = terminal.backend().to_string();
        let lines = LINES.into_iter().flat_map(|(name, line)| [name, line]);
        let rules = (1..7).map(|number| format!("rule {number}"));
        let others =
            ["kill an inspector", "SYN flood", "quit", "over_limit", "servers, workers", "dropped 123,456/s"];
        for text in lines.chain(others).map(str::to_owned).chain(rules) {
            assert!(screen.contains(&text), "{text} is not on the screen:\n{screen}");
        }
    }
}
