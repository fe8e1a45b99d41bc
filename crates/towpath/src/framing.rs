//! Framings as named on the command line and in configurations: a preset, clauses, or a file with clauses in
//! TOML or a BPF program made for KCM. See docs/book/src/reference/framing.md.

use std::path::{Path, PathBuf};

use thiserror::Error;
use towpath_mux::framing::Framing;

/// A framing and its name.
#[derive(Clone, Debug)]
pub struct Named {
    text: String,
    /// Content of the file, if it is one: a changed file counts as a different framing.
    document: Option<Vec<u8>>,
    framing: Framing,
}

/// Error of a framing's name or its file.
#[derive(Debug, Error)]
pub enum Error {
    /// The TOML document has an error; contains line and column.
    #[error("{0}:{1}")]
    Document(String, String),
    /// The text does not name a framing.
    #[error("{0}: {1}")]
    Other(String, String),
}

impl Error {
    /// The reason without the name.
    pub fn why(&self) -> &str {
        let (Self::Document(_, why) | Self::Other(_, why)) = self;
        why
    }
}

impl Named {
    /// Reads the framing that `text` names. Paths are relative to `directory`.
    ///
    /// # Errors
    /// Says why `text` is not a framing.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::path::Path;
    /// use towpath::framing::Named;
    ///
    /// assert_eq!(Named::read("dns-tcp", Path::new(".")).unwrap().framing().name(), "dns-tcp");
    /// let error = Named::read("no/such.o", Path::new(".")).unwrap_err();
    /// assert_eq!(error.to_string(), "no/such.o: no such file, and not a framing");
    /// ```
    pub fn read(text: &str, directory: &Path) -> Result<Self, Error> {
        let refused = |error: &dyn std::fmt::Display| Error::Other(text.to_owned(), error.to_string());
        let named = |framing, document| Self { text: text.to_owned(), document, framing };
        let (path, program) = file(text, directory);
        if Framing::preset(text).is_ok() || !path.is_file() {
            let looks_like_a_file = text.contains(['/', '.']) && !text.contains(['=', '(', ' ']);
            return match Framing::parse(text) {
                Err(_) if looks_like_a_file => Err(refused(&"no such file, and not a framing")),
                Err(error) => Err(refused(&error)),
                Ok(framing) => Ok(named(framing, None)),
            };
        }
        let bytes = std::fs::read(path).map_err(|error| refused(&error))?;
        // An ELF object, raw instructions, or the output of tcpdump -ddd. A TOML document starts with none of these.
        let numbers = bytes.trim_ascii_start().first().is_some_and(u8::is_ascii_digit);
        let framing = match std::str::from_utf8(&bytes) {
            Ok(document) if !numbers && !document.contains('\0') => Framing::from_toml(document)
                .map_err(|error| Error::Document(text.to_owned(), error.to_string()))?,
            _ => {
                let options =
                    towpath_bpf::LoadOptions { name: program, ..towpath_bpf::LoadOptions::default() };
                let program = towpath_bpf::Program::load(&bytes, &options);
                Framing::program(text, program.map_err(|error| refused(&error))?)
            }
        };
        Ok(named(framing, Some(bytes)))
    }

    /// The framing.
    pub fn framing(&self) -> &Framing {
        &self.framing
    }

    /// The path of its file, if it is one. Paths are relative to `directory`.
    pub fn file(&self, directory: &Path) -> Option<PathBuf> {
        self.document.as_ref().map(|_| file(&self.text, directory).0)
    }
}

/// Equal if the names and the contents are equal.
impl PartialEq for Named {
    fn eq(&self, other: &Self) -> bool {
        (&self.text, &self.document) == (&other.text, &other.document)
    }
}

impl Eq for Named {}

/// Splits `FILE:NAME`, which selects one program of an object, into path and name.
fn file(text: &str, directory: &Path) -> (PathBuf, Option<String>) {
    match text.rsplit_once(':') {
        Some((file, name)) if !directory.join(text).is_file() => {
            (directory.join(file), Some(name.to_owned()))
        }
        _ => (directory.join(text), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_relative_and_compared_by_content() {
        let directory = tempfile::tempdir().unwrap();
        let read = |text: &str| Named::read(text, directory.path());
        std::fs::write(directory.path().join("f.toml"), "length = 2\n").unwrap();
        let before = read("f.toml").unwrap();
        assert_eq!(before, read("f.toml").unwrap());
        assert_ne!(before, read("length=2").unwrap());
        std::fs::write(directory.path().join("f.toml"), "length = 4\n").unwrap();
        assert_ne!(before, read("f.toml").unwrap());
        std::fs::write(directory.path().join("f.toml"), "\nlenght = 4\n").unwrap();
        let error = read("f.toml").unwrap_err();
        assert_eq!(error.to_string(), "f.toml:2:1: unknown key \"lenght\"; did you mean \"length\"?");
        assert_eq!(error.why(), "2:1: unknown key \"lenght\"; did you mean \"length\"?");
        // Presets take precedence over files.
        std::fs::write(directory.path().join("line"), "length = 4\n").unwrap();
        assert_eq!(read("line").unwrap().framing().name(), "line");
    }

    #[test]
    fn programs_are_selected_by_name() {
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../towpath-bpf/tests/programs");
        for text in ["thrift.o", "thrift.o:frame"] {
            let framing = Named::read(text, &programs).unwrap();
            assert_eq!(framing.framing().name(), text);
        }
        let error = Named::read("thrift.o:other", &programs).unwrap_err().to_string();
        assert!(error.starts_with("thrift.o:other: "), "{error}");
    }
}
