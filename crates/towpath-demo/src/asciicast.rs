//! A recording of the screen in asciicast v2: a JSON line for the header and one for each chunk of output.

use std::io::{self, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::json;

/// Chunks of output with their times. There are few: the screen is drawn ten times a second.
#[derive(Debug)]
pub(super) struct Asciicast {
    width: u16,
    height: u16,
    begun: Instant,
    wall: u64,
    pieces: Vec<(Duration, String)>,
    /// Output since the last chunk.
    open: Vec<u8>,
}

impl Asciicast {
    pub(super) fn new(width: u16, height: u16) -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { width, height, begun: Instant::now(), wall, pieces: Vec::new(), open: Vec::new() }
    }

    /// Ends a chunk.
    pub(super) fn cut(&mut self) {
        self.cut_at(self.begun.elapsed());
    }

    fn cut_at(&mut self, at: Duration) {
        if !self.open.is_empty() {
            // The backend writes text and escape sequences only.
            self.pieces.push((at, String::from_utf8_lossy(&self.open).into_owned()));
            self.open.clear();
        }
    }

    /// The file's contents.
    pub(super) fn emit(&self, to: &mut impl Write) -> io::Result<()> {
        let header = json!({
            "version": 2, "width": self.width, "height": self.height, "timestamp": self.wall,
            "title": "towpath demo", "env": {"TERM": "xterm-256color"},
        });
        writeln!(to, "{header}")?;
        for (at, text) in &self.pieces {
            writeln!(to, "{}", json!([(at.as_secs_f64() * 1e6).round() / 1e6, "o", text]))?;
        }
        Ok(())
    }
}

impl Write for Asciicast {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.open.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::Asciicast;

    #[test]
    fn a_recording_is_a_header_and_pieces_in_their_order() {
        let mut cast = Asciicast::new(80, 24);
        cast.write_all(b"\x1b[1;1Hone").unwrap();
        cast.cut_at(Duration::from_millis(250));
        cast.cut_at(Duration::from_millis(300));
        cast.write_all("zw\u{f6}lf\"\r\n".as_bytes()).unwrap();
        cast.cut_at(Duration::from_millis(500));
        let mut file = Vec::new();
        cast.emit(&mut file).unwrap();
        let lines: Vec<Value> = String::from_utf8(file)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(
            (&lines[0]["version"], &lines[0]["width"], &lines[0]["height"]),
            (&json!(2), &json!(80), &json!(24))
        );
        assert_eq!(lines[1..], [json!([0.25, "o", "\u{1b}[1;1Hone"]), json!([0.5, "o", "zw\u{f6}lf\"\r\n"])]);
    }
}
