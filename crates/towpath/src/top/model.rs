//! The state of the terminal view: samples and keys in, lines and commands out. No IO.

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Value, json};

use super::flows::{self, Flows};
use super::sample::{Part, Sample};
use super::table::{Cell, Kind, Row, Sort, Table};
use super::text::{clean, short, wrap};
use super::views::{Pair, View};
use crate::control::FlowFilter;
use crate::control::text::items;

/// Lines of a trace that are kept.
const TRACE: usize = 500;
/// Characters of a filter.
const FILTER: usize = 200;
/// Lines above the rows.
const HEAD: usize = 4;
/// Lines of a message.
const MESSAGE: usize = 4;
/// Minimum size of the terminal.
pub(super) const LEAST: (usize, usize) = (80, 24);

/// A key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Enter,
    Escape,
    Backspace,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
    /// Ctrl-C.
    Interrupt,
}

/// What the view wants of the engine.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Command {
    /// Samples have these parts, and states with this filter (the member `filter` of `show-states`).
    Read(Wanted),
    /// Ends the state of a flow.
    End(String),
    /// Traces the packets of a request `follow`.
    Trace(Value),
    StopTrace,
}

/// The parts of a sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Wanted {
    /// False in a pause.
    pub(super) running: bool,
    pub(super) parts: Vec<Part>,
    pub(super) flows: bool,
    pub(super) filter: Option<Value>,
}

/// How a line is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Bold,
    Header,
    Selected,
    Alert,
    Help,
}

/// A line of the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) text: String,
    pub(super) style: Style,
}

/// The state of one view.
#[derive(Clone, Debug)]
struct List {
    sort: Sort,
    filter: String,
    /// The id of the selected row, and where it was.
    selected: Option<String>,
    position: usize,
    /// The first row on the screen.
    first: usize,
}

#[derive(Debug)]
enum Mode {
    List,
    Help,
    /// The filter is being written; the text before.
    Filter(String),
    /// Ends this flow if the key is `y`.
    Confirm(Row),
    Detail(Detail),
}

/// One object, and the packets that it is traced by.
#[derive(Debug)]
struct Detail {
    view: View,
    row: Row,
    scroll: usize,
    trace: Option<VecDeque<String>>,
    /// Packets so far, and why the trace ended.
    traced: (u64, Option<String>),
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Model {
    socket: String,
    interval: f64,
    view: View,
    lists: BTreeMap<View, List>,
    mode: Mode,
    paused: bool,
    now: Option<Sample>,
    before: Option<Sample>,
    flows: Flows,
    /// Why there is no engine.
    gone: Option<String>,
    message: Option<String>,
    commands: VecDeque<Command>,
    /// The last [`Command::Read`].
    wanted: Wanted,
    quit: bool,
    /// Lines for rows at the last drawing.
    page: usize,
}

impl Model {
    pub(super) fn new(socket: &str, interval: f64) -> Self {
        let list = |view: View| {
            let list =
                List { sort: view.sort(), filter: String::new(), selected: None, position: 0, first: 0 };
            (view, list)
        };
        let mut model = Self {
            socket: clean(socket),
            interval,
            view: View::Ports,
            lists: View::ALL.map(list).into(),
            mode: Mode::List,
            paused: false,
            now: None,
            before: None,
            flows: Flows::default(),
            gone: None,
            message: None,
            commands: VecDeque::new(),
            wanted: Wanted::default(),
            quit: false,
            page: LEAST.1,
        };
        model.want();
        model
    }

    /// Takes a sample.
    pub(super) fn handle_sample(&mut self, mut sample: Sample) {
        if self.paused {
            return;
        }
        self.gone = None;
        if let Some(Ok(part)) = &mut sample.flows {
            let states = std::mem::take(&mut part.states);
            self.flows.take(states, sample.at, part.swept);
        }
        self.before = self.now.replace(sample);
    }

    /// The engine cannot be reached. The last sample stays on the screen.
    pub(super) fn handle_gone(&mut self, why: &str) {
        if self.gone.is_none() {
            // Another engine has other counters and states.
            self.before = None;
            self.flows.clear();
        }
        self.gone = Some(clean(why));
    }

    /// The result of a command, for people.
    pub(super) fn handle_message(&mut self, message: &str) {
        self.message = Some(clean(message));
    }

    /// Takes lines of the trace.
    pub(super) fn handle_trace(&mut self, lines: Vec<String>) {
        let Mode::Detail(Detail { trace: Some(trace), traced, .. }) = &mut self.mode else { return };
        traced.0 += lines.len() as u64;
        trace.extend(lines);
        trace.drain(..trace.len().saturating_sub(TRACE));
    }

    /// The trace has ended.
    pub(super) fn handle_trace_end(&mut self, why: &str) {
        if let Mode::Detail(Detail { trace: Some(_), traced, .. }) = &mut self.mode {
            traced.1 = Some(clean(why));
        }
    }

    /// Returns what to do next.
    pub(super) fn poll_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// Returns true after the key that ends the view.
    pub(super) fn is_over(&self) -> bool {
        self.quit
    }

    /// Takes a key.
    pub(super) fn handle_key(&mut self, key: Key) {
        if key == Key::Interrupt {
            self.quit = true;
            return;
        }
        self.message = None;
        match std::mem::replace(&mut self.mode, Mode::List) {
            Mode::List => self.list_key(key),
            Mode::Help => {}
            Mode::Filter(before) => self.filter_key(key, before),
            Mode::Confirm(row) if key == Key::Char('y') => {
                self.commands.push_back(Command::End(flows::exactly(&row.object)));
            }
            Mode::Confirm(_) => self.message = Some("nothing ended".to_owned()),
            Mode::Detail(detail) => self.detail_key(key, detail),
        }
        self.want();
    }

    fn list_key(&mut self, key: Key) {
        match key {
            Key::Char('q') => self.quit = true,
            Key::Char('?' | 'h') => self.mode = Mode::Help,
            Key::Char('p' | ' ') => self.paused = !self.paused,
            Key::Char('/') => self.mode = Mode::Filter(self.list().filter.clone()),
            Key::Char(digit @ '1'..='6') => self.view = View::ALL[digit as usize - '1' as usize],
            Key::Right => self.turn(1),
            Key::Left => self.turn(View::ALL.len() - 1),
            Key::Char('s') => self.sort_by_next(),
            Key::Char('r') => {
                let list = self.list_mut();
                list.sort.descending = !list.sort.descending;
            }
            Key::Escape => self.set_filter(String::new()),
            Key::Enter => self.open(false),
            Key::Char('t') => self.open(true),
            Key::Char('e') => match (self.view, self.selected()) {
                (View::Flows, Some(row)) => self.mode = Mode::Confirm(row),
                (View::Flows, None) => {}
                _ => self.message = Some("only a flow has a state to end; press 3".to_owned()),
            },
            Key::Up => self.step(|at, _| at.saturating_sub(1)),
            Key::Down => self.step(|at, _| at + 1),
            Key::PageUp => self.step(|at, page| at.saturating_sub(page)),
            Key::PageDown => self.step(|at, page| at + page),
            Key::Home => self.step(|_, _| 0),
            Key::End => self.step(|_, _| usize::MAX),
            Key::Char(_) | Key::Backspace | Key::Interrupt => {}
        }
    }

    fn turn(&mut self, by: usize) {
        let at = View::ALL.iter().position(|view| *view == self.view).unwrap_or(0);
        self.view = View::ALL[(at + by) % View::ALL.len()];
    }

    fn sort_by_next(&mut self) {
        let columns = self.view.columns();
        let list = self.list_mut();
        let next = list.sort.column.map_or(0, |column| column + 1);
        list.sort.column = (next < columns.len()).then_some(next);
        // The most first, names from A on.
        list.sort.descending =
            list.sort.column.is_none_or(|at| matches!(columns[at].kind, Kind::Count | Kind::Nanos));
    }

    fn filter_key(&mut self, key: Key, before: String) {
        let mut filter = self.list().filter.clone();
        match key {
            Key::Enter => return,
            Key::Escape => return self.set_filter(before),
            Key::Backspace => {
                filter.pop();
            }
            Key::Char(c) if filter.chars().count() < FILTER && !c.is_control() => filter.push(c),
            _ => {}
        }
        self.set_filter(filter);
        self.mode = Mode::Filter(before);
    }

    fn set_filter(&mut self, filter: String) {
        let before = self.asked();
        self.list_mut().filter = filter;
        if self.view == View::Flows && self.asked() != before {
            // Other states will be read.
            self.flows.clear();
        }
    }

    fn detail_key(&mut self, key: Key, mut detail: Detail) {
        match key {
            Key::Char('q') => self.quit = true,
            Key::Escape | Key::Backspace | Key::Left => {
                if detail.trace.is_some() {
                    self.commands.push_back(Command::StopTrace);
                }
                return;
            }
            Key::Up => detail.scroll = detail.scroll.saturating_sub(1),
            Key::Down => detail.scroll += 1,
            Key::PageUp => detail.scroll = detail.scroll.saturating_sub(self.page),
            Key::PageDown => detail.scroll += self.page,
            Key::Home => detail.scroll = 0,
            Key::Char('t') => match detail.trace.take() {
                Some(_) => self.commands.push_back(Command::StopTrace),
                None => self.trace(&mut detail),
            },
            Key::Char('e') if detail.view == View::Flows => {
                if detail.trace.is_some() {
                    self.commands.push_back(Command::StopTrace);
                }
                self.mode = Mode::Confirm(detail.row);
                return;
            }
            _ => {}
        }
        self.mode = Mode::Detail(detail);
    }

    /// Shows the selected row, and its packets if `trace` is set.
    fn open(&mut self, trace: bool) {
        let Some(row) = self.selected() else { return };
        let mut detail = Detail { view: self.view, row, scroll: 0, trace: None, traced: (0, None) };
        if trace {
            self.trace(&mut detail);
        }
        self.mode = Mode::Detail(detail);
    }

    fn trace(&mut self, detail: &mut Detail) {
        match traceable(detail) {
            Some(request) => {
                detail.trace = Some(VecDeque::new());
                detail.traced = (0, None);
                self.commands.push_back(Command::Trace(request));
            }
            None => self.message = Some("rules, flows and the engine's drop reasons have traces".to_owned()),
        }
    }

    fn list(&self) -> &List {
        &self.lists[&self.view]
    }

    fn list_mut(&mut self) -> &mut List {
        self.lists.get_mut(&self.view).expect("every view has a list")
    }

    /// The filter that the engine applies to flows: a flow or a prefix.
    fn asked(&self) -> Option<Value> {
        let words = self.lists[&View::Flows].filter.trim();
        if words.is_empty() {
            None
        } else if FlowFilter::new(None, Some(words)).is_ok() {
            Some(json!({ "flow": words }))
        } else if words.split('/').next().is_some_and(|address| address.parse::<std::net::IpAddr>().is_ok()) {
            Some(json!({ "address": words }))
        } else {
            None
        }
    }

    /// Tells the reader what to read, if that has changed.
    fn want(&mut self) {
        let mut parts = vec![Part::Stats];
        let mut view = self.view;
        if let Mode::Detail(detail) = &self.mode {
            view = detail.view;
            if view == View::Flows {
                parts.push(Part::Rules);
            }
        }
        parts.extend(view.parts());
        let flows = view == View::Flows;
        let wanted = Wanted { running: !self.paused, parts, flows, filter: self.asked().filter(|_| flows) };
        if wanted != self.wanted {
            self.wanted = wanted.clone();
            self.commands.push_back(Command::Read(wanted));
        }
    }

    fn pair(&self) -> Option<Pair<'_>> {
        Some(Pair { now: self.now.as_ref()?, before: self.before.as_ref() })
    }

    fn table(&self) -> Table {
        let Some(pair) = self.pair() else {
            return Table { columns: self.view.columns(), ..Table::default() };
        };
        let mut table = self.view.table(&pair, &self.flows);
        let list = self.list();
        if !(list.filter.is_empty() || self.view == View::Flows && self.asked().is_some()) {
            table.filter(&list.filter);
        }
        table.sort(list.sort);
        table
    }

    fn selected(&self) -> Option<Row> {
        let mut table = self.table();
        let at = self.position(&table)?;
        Some(table.rows.swap_remove(at))
    }

    /// The index of the selected row: the same object as before, or the row at its position.
    fn position(&self, table: &Table) -> Option<usize> {
        let list = self.list();
        let same = list.selected.as_ref().and_then(|id| table.rows.iter().position(|row| row.id == *id));
        same.or_else(|| table.rows.len().checked_sub(1).map(|last| list.position.min(last)))
    }

    fn step(&mut self, to: impl Fn(usize, usize) -> usize) {
        let table = self.table();
        let Some(at) = self.position(&table) else { return };
        let at = to(at, self.page).min(table.rows.len() - 1);
        let id = table.rows[at].id.clone();
        let list = self.list_mut();
        (list.selected, list.position) = (Some(id), at);
    }

    /// The screen: exactly `height` lines of at most `width` characters.
    pub(super) fn lines(&mut self, width: usize, height: usize) -> Vec<Line> {
        let mut lines = Vec::new();
        if width < LEAST.0 || height < LEAST.1 {
            let text =
                format!("The terminal is {width}x{height}; towpath top needs {}x{}.", LEAST.0, LEAST.1);
            lines.extend(wrap(&text, width, height.max(1)).into_iter().map(|text| line(text, Style::Alert)));
            lines.extend((lines.len()..height).map(|_| line("", Style::Plain)));
            lines.truncate(height);
            return lines;
        }
        let Line { text, style } = self.status_line();
        let status: Vec<Line> =
            wrap(&text, width, MESSAGE).into_iter().map(|text| line(text, style)).collect();
        let room = height - HEAD - status.len() - 1;
        self.page = room;
        lines.extend(self.head(width));
        let mut body = match &self.mode {
            Mode::Help => help().into_iter().map(|text| line(text, Style::Plain)).collect(),
            Mode::Detail(_) => self.detail(width, room + 1),
            _ => self.rows(width, room),
        };
        body.truncate(room + 1);
        lines.extend(body);
        lines.extend((lines.len()..height - status.len() - 1).map(|_| line("", Style::Plain)));
        lines.extend(status);
        lines.push(line(self.keys(), Style::Help));
        for line in &mut lines {
            line.text = line.text.chars().take(width).collect();
        }
        lines
    }

    fn head(&self, width: usize) -> Vec<Line> {
        let (state, style) = match (&self.gone, self.paused, &self.now) {
            (Some(_), ..) => ("NO ENGINE", Style::Alert),
            (None, true, _) => ("PAUSED", Style::Alert),
            (None, false, None) => ("waiting", Style::Bold),
            (None, false, Some(_)) => ("running", Style::Bold),
        };
        let right = format!("{state}, every {}s", self.interval);
        let left = format!("towpath top  {}", self.socket);
        let room = width - right.len() - 1;
        // The end of a path says more than its beginning.
        let left = match left.chars().count() > room {
            true => {
                let skip = left.chars().count() - room + 3;
                format!("...{}", left.chars().skip(skip).collect::<String>())
            }
            false => left,
        };
        let pad = width - left.chars().count() - right.len();
        let first = format!("{left}{:pad$}{right}", "");
        let totals = self.pair().map(|pair| pair.totals()).unwrap_or_default();
        let number = |key: &str| totals.get(key).and_then(Value::as_f64).map_or("-".to_owned(), short);
        let second = format!(
            "packets {}/s  passed {}/s  dropped {}/s  rejected {}/s  states {} of {}",
            number("packets_per_second"),
            number("passed_per_second"),
            number("dropped_per_second"),
            number("rejected_per_second"),
            number("states"),
            number("states_max"),
        );
        let tab = |(number, view): (usize, &View)| match *view == self.view {
            true => format!("[{} {}]", number + 1, view.name()),
            false => format!(" {} {} ", number + 1, view.name()),
        };
        let tabs: String = View::ALL.iter().enumerate().map(tab).collect();
        vec![line(first, style), line(second, Style::Plain), line(tabs, Style::Bold)]
    }

    fn rows(&mut self, width: usize, room: usize) -> Vec<Line> {
        let table = self.table();
        let (header, rows) = table.lines(width, Some(self.list().sort));
        let at = self.position(&table);
        let list = self.list_mut();
        let position = at.unwrap_or(0);
        list.position = position;
        list.first = list.first.min(position);
        let height = |first: usize| rows[first..=position].iter().map(Vec::len).sum::<usize>();
        while at.is_some() && list.first < position && height(list.first) > room {
            list.first += 1;
        }
        let first = list.first;
        let mut lines = vec![line(header, Style::Header)];
        for (index, row) in rows.iter().enumerate().skip(first) {
            if lines.len() > room {
                break;
            }
            let style = if Some(index) == at { Style::Selected } else { Style::Plain };
            lines.extend(row.iter().map(|text| line(text.clone(), style)));
        }
        if table.rows.is_empty() && table.note.is_none() {
            let text = match (&self.now, self.list().filter.is_empty()) {
                (None, _) => "no sample yet",
                (_, true) => "none",
                (_, false) => "none that the filter accepts",
            };
            lines.push(line(text, Style::Plain));
        }
        if let Some(note) = table.note.filter(|_| lines.len() <= room) {
            lines.extend(wrap(&clean(&note), width, 3).into_iter().map(|text| line(text, Style::Plain)));
        }
        lines
    }

    fn detail(&self, width: usize, room: usize) -> Vec<Line> {
        let Mode::Detail(detail) = &self.mode else { return Vec::new() };
        let mut all = Vec::new();
        let mut add = |text: &str, style| {
            all.extend(wrap(&clean(text), width, usize::MAX).into_iter().map(|text| line(text, style)));
        };
        // The row as it is now; as it was if it is gone.
        let current = self.pair().map(|pair| detail.view.table(&pair, &self.flows));
        let current = current.and_then(|table| table.rows.into_iter().find(|row| row.id == detail.row.id));
        let row = current.as_ref().unwrap_or(&detail.row);
        add(&format!("{}: {}", detail.view.name(), title(detail.view, row)), Style::Header);
        if current.is_none() && self.gone.is_none() && self.now.is_some() {
            add("It is no longer listed; these are its last values.", Style::Alert);
        }
        if let (View::Flows, Some(number)) = (detail.view, row.object["rule"].as_u64()) {
            let rules =
                self.now.as_ref().map(|now| items(&now.part(Part::Rules)["rules"])).unwrap_or_default();
            for rule in rules.iter().filter(|rule| rule["number"] == number) {
                let text = rule["text"].as_str().unwrap_or_default();
                add(&format!("its rule: {number:05} {text} ({} packets)", rule["packets"]), Style::Bold);
            }
        }
        if let Some(trace) = &detail.trace {
            let (packets, end) = &detail.traced;
            let end = end.as_deref().map_or(String::new(), |why| format!("; ended: {why}"));
            add(&format!("trace: {packets} packets, the newest first{end}"), Style::Header);
            for text in trace.iter().rev() {
                add(text, Style::Plain);
            }
        }
        for text in members(&row.object, "") {
            add(&text, Style::Plain);
        }
        let first = detail.scroll.min(all.len().saturating_sub(room));
        all.drain(..first);
        all
    }

    fn status_line(&self) -> Line {
        let list = self.list();
        match (&self.mode, &self.message, &self.gone) {
            (Mode::Filter(_), ..) => line(format!("filter: {}_", clean(&list.filter)), Style::Bold),
            (Mode::Confirm(row), ..) => {
                let text = format!("End {}? y: yes, any other key: no", clean(&flows::words(&row.object)));
                line(text, Style::Alert)
            }
            (_, Some(message), _) => line(message.clone(), Style::Alert),
            (_, None, Some(gone)) => line(gone.clone(), Style::Alert),
            _ if !list.filter.is_empty() => line(format!("filter: {}", clean(&list.filter)), Style::Bold),
            _ => line("", Style::Plain),
        }
    }

    fn keys(&self) -> &'static str {
        match &self.mode {
            Mode::Help => "any key: back",
            Mode::Filter(_) => "words, or for flows a FLOW or PREFIX; enter: keep  esc: as before",
            Mode::Confirm(_) => "y: yes",
            Mode::Detail(_) => "esc:back t:trace on/off e:end state up/down:scroll q:quit",
            Mode::List => "1-6:view enter:open t:trace /:filter s,r:sort e:end p:pause ?:help q:quit",
        }
    }
}

/// The request `follow` for the packets of an object.
fn traceable(detail: &Detail) -> Option<Value> {
    let object = &detail.row.object;
    match detail.view {
        View::Rules => Some(json!({ "rule": object["number"].as_u64()? })),
        View::Flows => Some(json!({ "flow": flows::traced(object) })),
        // The losses of a queue are frames, not packets. The driver's are traced as far as the engine sees the packets.
        View::Drops if !object["by"].as_str()?.starts_with("queue ") => {
            Some(json!({ "drop": object["reason"].as_str()? }))
        }
        View::Drops | View::Ports | View::Inspectors | View::Muxes => None,
    }
}

/// The text by which a row is known: its last column, or its first one.
fn title(view: View, row: &Row) -> &str {
    let tail = view.columns().iter().position(|column| column.kind == Kind::Tail).unwrap_or(0);
    match row.cells.get(tail) {
        Some(Cell::Text(text)) => text,
        _ => "-",
    }
}

fn line(text: impl Into<String>, style: Style) -> Line {
    Line { text: text.into(), style }
}

/// A line for each member of an object.
fn members(object: &Value, prefix: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, value) in object.as_object().into_iter().flatten() {
        let name = format!("{prefix}{name}");
        match value {
            Value::Object(_) => lines.extend(members(value, &format!("{name}."))),
            Value::String(text) => lines.push(format!("{name:<14} {text}")),
            value => lines.push(format!("{name:<14} {value}")),
        }
    }
    lines
}

fn help() -> Vec<String> {
    "\
1 to 6, left, right   ports, rules, flows, inspectors, muxes, drops
up, down, page, home  select a row
enter                 all values of the row; of a flow, also its rule
t                     trace the packets of a rule, of a flow, or of a drop
                      reason; while a trace runs, the fast path is off
/                     filter: the rows with these words; in the flows also
                      a flow (`tcp 10.0.0.1 :22`) or a prefix, which the
                      engine looks for in all its states; esc removes it
s, r                  sort by the next column, in the other direction
e                     end the state of the flow, after a question
p, space              pause
q                     quit

Rates are per second between the last two samples; `-` is unknown. A flow's
rate is that since it was last read: at most 4,000 states are read at a time."
        .lines()
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests;
