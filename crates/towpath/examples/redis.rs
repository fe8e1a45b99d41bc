//! A key-value server that speaks Redis' protocol, in as many processes as you like: a key is a file in a directory that they
//! share, written to another file of the directory and renamed, so that no reader sees half a value.
//!
//! ```text
//! mkdir /dev/shm/keys
//! towpath mux 127.0.0.1:6379 --framing resp --order serial --workers 4 \
//!     --worker 'target/debug/examples/redis /dev/shm/keys'
//! redis-cli set greeting hello; redis-cli get greeting; redis-benchmark -q -t ping,set,get,incr -n 10000
//! ```

use std::error::Error;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use towpath_ring::Worker;

fn main() -> Result<(), Box<dyn Error>> {
    let directory: PathBuf = std::env::args_os().nth(1).ok_or("usage: redis DIRECTORY")?.into();
    let mut worker = Worker::attach_env()?;
    while let Some(message) = worker.recv()? {
        let command = parse(worker.bytes(&message));
        let words: Vec<&[u8]> = command.iter().map(Vec::as_slice).collect();
        let answer = answer(&directory, &words).unwrap_or_else(|error| format!("-ERR {error}\r\n").into());
        worker.reply(&message, &answer)?;
        if words.first().is_some_and(|name| name.eq_ignore_ascii_case(b"quit")) {
            worker.close_after(&message)?;
        }
        worker.done(message);
    }
    Ok(())
}

/// An array of bulk strings, or an inline command. The framing has seen to it that all of it is there; what is no
/// command all the same, as an array with a null in it, ends there.
fn parse(bytes: &[u8]) -> Vec<Vec<u8>> {
    if bytes.first() != Some(&b'*') {
        return bytes.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).map(Vec::from).collect();
    }
    let (mut words, mut rest) = (Vec::new(), &bytes[line(bytes)..]);
    while let Some((word, after)) = bulk_string(rest) {
        words.push(word.to_vec());
        rest = after;
    }
    words
}

/// The string at the start of `bytes`, and the rest.
fn bulk_string(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.strip_prefix(b"$")?.split_at_checked(line(bytes) - 1)?;
    let (word, rest) = rest.split_at_checked(str::from_utf8(length).ok()?.trim_end().parse().ok()?)?;
    Some((word, rest.strip_prefix(b"\r\n")?))
}

fn line(bytes: &[u8]) -> usize {
    bytes.iter().position(|&byte| byte == b'\n').map_or(bytes.len(), |at| at + 1)
}

fn answer(directory: &Path, words: &[&[u8]]) -> Result<Vec<u8>, Box<dyn Error>> {
    // A key's name may be anything: the file's is its bytes in hex.
    let file = |key: &[u8]| directory.join(key.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    let name = words.first().map(|name| name.to_ascii_uppercase()).unwrap_or_default();
    Ok(match (&name[..], words.get(1..).unwrap_or(&[])) {
        (b"QUIT", _) => b"+OK\r\n".to_vec(),
        (b"PING", []) => b"+PONG\r\n".to_vec(),
        (b"PING" | b"ECHO", [text]) => bulk(text),
        (b"GET", [key]) => match fs::read(file(key)) {
            Ok(value) => bulk(&value),
            Err(error) if error.kind() == ErrorKind::NotFound => b"$-1\r\n".to_vec(),
            Err(error) => return Err(error.into()),
        },
        (b"SET", [key, value, ..]) => set(&file(key), value).map(|()| b"+OK\r\n".to_vec())?,
        (b"DEL", keys) => number(keys.iter().filter(|key| fs::remove_file(file(key)).is_ok()).count() as i64),
        (b"EXISTS", keys) => number(keys.iter().filter(|key| file(key).exists()).count() as i64),
        (b"INCR", [key]) => {
            // One process at a time counts.
            let lock = File::create(directory.join("lock"))?;
            lock.lock()?;
            let before = fs::read_to_string(file(key)).unwrap_or_else(|_| "0".to_owned());
            let value = before.parse::<i64>().ok().and_then(|value| value.checked_add(1));
            let after = value.ok_or("value is not an integer or out of range")?;
            set(&file(key), after.to_string().as_bytes())?;
            number(after)
        }
        // Requests that clients send at the start.
        (b"CONFIG" | b"COMMAND", _) => b"*0\r\n".to_vec(),
        (other, _) => return Err(format!("unknown command '{}'", other.escape_ascii()).into()),
    })
}

fn set(file: &Path, value: &[u8]) -> std::io::Result<()> {
    let beside = file.with_extension(std::process::id().to_string());
    fs::write(&beside, value)?;
    fs::rename(beside, file)
}

fn bulk(bytes: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

fn number(number: i64) -> Vec<u8> {
    format!(":{number}\r\n").into()
}
