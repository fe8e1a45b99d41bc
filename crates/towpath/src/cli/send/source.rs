//! The input of `towpath send`: the data ranges and holes of a file, or standard input.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// The next part of a source.
pub(super) enum Piece {
    /// A hole of this many bytes.
    Hole(u64),
    /// Data at the start of the buffer. `record`: a data record of this many bytes starts with it.
    Data {
        len: usize,
        record: Option<u64>,
    },
    End,
}

pub(super) enum Source {
    File(SparseFile),
    /// Standard input, until its end.
    Stdin(File),
}

pub(super) struct SparseFile {
    file: File,
    name: String,
    before: Version,
    /// Position of the next piece, and the end of its data range.
    at: u64,
    data_until: u64,
}

/// The attributes of a file that change when it is written: its size, and the times of its last modification and status change.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Version {
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Version {
    fn of(file: &File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self {
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

impl Source {
    /// Opens a file; `-` is standard input.
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        let name = path.display();
        let error = |error: std::io::Error| format!("{name}: {error}");
        if path == Path::new("-") {
            let stdin = std::io::stdin().as_fd().try_clone_to_owned();
            return Ok(Self::Stdin(stdin.map_err(|error| format!("standard input: {error}"))?.into()));
        }
        // Check the type first: opening a FIFO would block.
        let metadata = std::fs::metadata(path).map_err(error)?;
        if metadata.is_dir() {
            return Err(format!(
                "{name}: a directory; one file is sent. Use rsync for directories and to resume a transfer"
            ));
        }
        if !metadata.is_file() {
            return Err(format!("{name}: not a file; send a stream with `towpath send - --to ... <{name}`"));
        }
        let file = File::open(path).map_err(error)?;
        let before = Version::of(&file).map_err(error)?;
        Ok(Self::File(SparseFile { file, name: name.to_string(), before, at: 0, data_until: 0 }))
    }

    /// Length in bytes, if known.
    pub(super) fn length(&self) -> Option<u64> {
        match self {
            Self::File(file) => Some(file.before.size),
            Self::Stdin(_) => None,
        }
    }

    /// Reads the next piece, at most as many bytes of data as `into` has.
    pub(super) fn next(&mut self, into: &mut [u8]) -> Result<Piece, String> {
        match self {
            Self::File(file) => file.next(into),
            Self::Stdin(stdin) => loop {
                return match stdin.read(into) {
                    Ok(0) => Ok(Piece::End),
                    Ok(len) => Ok(Piece::Data { len, record: Some(len as u64) }),
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) => Err(format!("standard input: {error}")),
                };
            },
        }
    }

    /// Describes how the file has changed since it was opened, if it has.
    pub(super) fn change(&self) -> Option<String> {
        let Self::File(SparseFile { file, name, before, .. }) = self else { return None };
        let after = Version::of(file).ok()?;
        let what = match () {
            () if after == *before => return None,
            () if after.size != before.size => format!("its size was {} and is {}", before.size, after.size),
            () if after.modified != before.modified => "its modification time differs".to_owned(),
            () => "its status change time differs".to_owned(),
        };
        Some(format!("{name} changed while it was sent: {what}; the copy may mix both versions"))
    }
}

impl SparseFile {
    fn next(&mut self, into: &mut [u8]) -> Result<Piece, String> {
        let mut record = None;
        if self.at == self.data_until {
            if self.at == self.before.size {
                return Ok(Piece::End);
            }
            let hole = self.find(SeekFrom::Data(self.at))?.unwrap_or(self.before.size) - self.at;
            if hole > 0 {
                self.at += hole;
                self.data_until = self.at;
                return Ok(Piece::Hole(hole));
            }
            self.data_until = self.find(SeekFrom::Hole(self.at))?.unwrap_or(self.before.size);
            record = Some(self.data_until - self.at);
        }
        let most = usize::try_from(self.data_until - self.at).unwrap_or(usize::MAX).min(into.len());
        let mut len = 0;
        while len < most {
            match self.file.read_at(&mut into[len..most], self.at + len as u64) {
                Ok(0) => return Err(self.shorter()),
                Ok(bytes) => len += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("{}: {error}", self.name)),
            }
        }
        self.at += len as u64;
        Ok(Piece::Data { len, record })
    }

    /// lseek(2) with SEEK_DATA or SEEK_HOLE, bounded to this transfer. `None` after the last data, and for SEEK_HOLE on a file
    /// system without holes.
    fn find(&self, what: SeekFrom) -> Result<Option<u64>, String> {
        match (rustix::fs::seek(&self.file, what), what) {
            (Ok(at), _) => Ok(Some(at.clamp(self.at, self.before.size))),
            // On a file system without holes, the whole file is data.
            (Err(Errno::INVAL), SeekFrom::Data(at)) => Ok(Some(at)),
            (Err(Errno::INVAL), _) => Ok(None),
            // No data follows: a hole up to the end, or the file is shorter now.
            (Err(Errno::NXIO), _) => match Version::of(&self.file) {
                Ok(now) if now.size < self.before.size => Err(self.shorter()),
                _ => Ok(None),
            },
            (Err(error), _) => Err(format!("{}: {error}", self.name)),
        }
    }

    fn shorter(&self) -> String {
        format!("{}: became shorter while it was sent; the receiver keeps nothing", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of a source: holes (true) and data with their lengths.
    fn pieces(source: &mut Source) -> Result<Vec<(bool, u64)>, String> {
        let (mut all, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            match source.next(&mut buffer)? {
                Piece::End => return Ok(all),
                Piece::Hole(bytes) => all.push((true, bytes)),
                Piece::Data { len, record } => {
                    record.into_iter().for_each(|bytes| all.push((false, bytes)));
                    assert!(len > 0);
                }
            }
        }
    }

    #[test]
    fn a_file_is_its_data_and_holes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sparse");
        let file = File::create(&path).unwrap();
        file.write_all_at(&vec![1; 100_000], 1 << 20).unwrap();
        file.set_len(3 << 20).unwrap();
        let all = pieces(&mut Source::open(&path).unwrap()).unwrap();
        assert_eq!(all.iter().map(|(_, bytes)| bytes).sum::<u64>(), 3 << 20);
        let data: u64 = all.iter().filter(|(hole, _)| !hole).map(|(_, bytes)| bytes).sum();
        // File systems allocate whole blocks; one without holes has only data.
        assert!(data >= 100_000 && (data < 200_000 || all.len() == 1), "{all:?}");
        std::fs::write(&path, "").unwrap();
        assert!(pieces(&mut Source::open(&path).unwrap()).unwrap().is_empty());
    }

    #[test]
    fn changes_and_truncation_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![7; 300_000]).unwrap();
        let mut source = Source::open(&path).unwrap();
        assert!(source.next(&mut [0; 1000]).is_ok() && source.change().is_none());
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"other", 5).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        assert!(source.change().unwrap().contains("modification time"));
        file.set_len(100_000).unwrap();
        assert!(source.change().unwrap().contains("size was 300000 and is 100000"));
        assert!(pieces(&mut source).unwrap_err().contains("became shorter"));
        let mut source = Source::open(&path).unwrap();
        file.set_len(0).unwrap();
        assert!(pieces(&mut source).unwrap_err().contains("became shorter"), "before the first read");
    }
}
