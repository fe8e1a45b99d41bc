//! A version of the group's configuration, as text: `nats kv get towpath-GROUP current` prints it.
//!
//! ```text
//! towpath-group 1
//! config 34 edge.toml
//! rules 120 edge.ipfw
//!
//! (34 bytes of the configuration, 120 bytes of the rules)
//! ```
//!
//! The configuration may be empty: it then has no name.

use thiserror::Error;

/// Bytes of the longest version: a message of NATS has at most 1 MiB by default.
pub const CONTENT_MAX: usize = 960 << 10;

/// Bytes of the longest name of a file.
const NAME_MAX: usize = 4096;

const FIRST: &str = "towpath-group 1";

/// A file of a version: its name in errors, and its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The name of the file.
    pub name: String,
    /// Its text.
    pub text: String,
}

impl Part {
    /// Whether a version can have this name: a short line.
    fn is_named(&self) -> bool {
        self.name.len() <= NAME_MAX && !self.name.contains(['\n', '\r'])
    }
}

/// What all gates of a group have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Keys of the configuration; without a name if there are none.
    pub config: Part,
    /// The rule file.
    pub rules: Part,
}

/// Why bytes are not a version, or files cannot be one.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ContentError {
    /// Another first line.
    #[error("it is not a configuration of a group, or one of a newer version of Towpath")]
    Version,
    /// The lengths are wrong, or the text is not UTF-8.
    #[error("it is damaged")]
    Malformed,
    /// The name of a file.
    #[error("the name of a file has at most {NAME_MAX} bytes and no line break")]
    Name,
    /// The files are too long.
    #[error(
        "the files have {0} bytes, and a version has at most 960 KiB ({CONTENT_MAX} bytes); create tables without entries in \
         the rule file, and load their entries with `towpath ctl fleet table NAME load FILE`"
    )]
    TooLong(usize),
}

impl Content {
    /// The version as bytes.
    ///
    /// # Errors
    /// The files are too long, or the name of a file is not one line.
    pub fn encode(&self) -> Result<Vec<u8>, ContentError> {
        let Self { config, rules } = self;
        for part in [config, rules] {
            if !part.is_named() {
                return Err(ContentError::Name);
            }
        }
        let head = |word: &str, part: &Part| format!("{word} {} {}\n", part.text.len(), part.name);
        let text =
            [FIRST, "\n", &head("config", config), &head("rules", rules), "\n", &config.text, &rules.text];
        let bytes = text.concat().into_bytes();
        if bytes.len() > CONTENT_MAX { Err(ContentError::TooLong(bytes.len())) } else { Ok(bytes) }
    }

    /// Reads a version. The bytes are untrusted.
    ///
    /// # Errors
    /// The bytes are no version that this Towpath can read.
    pub fn decode(bytes: &[u8]) -> Result<Self, ContentError> {
        if bytes.len() > CONTENT_MAX {
            return Err(ContentError::TooLong(bytes.len()));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| ContentError::Malformed)?;
        let (first, rest) = text.split_once('\n').ok_or(ContentError::Version)?;
        if first != FIRST {
            return Err(ContentError::Version);
        }
        let head = |rest: &'_ str, word: &str| {
            let (line, rest) = rest.split_once('\n')?;
            let (length, name) = line.strip_prefix(word)?.strip_prefix(' ')?.split_once(' ')?;
            let part = Part { name: name.to_owned(), text: String::new() };
            Some((part, length.parse::<usize>().ok()?, rest.len()))
        };
        let read = || {
            let (mut config, config_len, left) = head(rest, "config")?;
            let (mut rules, rules_len, left) = head(&rest[rest.len() - left..], "rules")?;
            let texts = rest[rest.len() - left..].strip_prefix('\n')?;
            let (one, two) = (texts.get(..config_len)?, texts.get(config_len..)?);
            (config.text, rules.text) = (one.to_owned(), two.to_owned());
            let named = config.is_named() && rules.is_named();
            (named && two.len() == rules_len).then_some(Self { config, rules })
        };
        read().ok_or(ContentError::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn part() -> impl Strategy<Value = Part> {
        ("[a-z/. ]{0,20}", "\\PC{0,40}|add 1 allow ip from any to any\n")
            .prop_map(|(name, text)| Part { name, text })
    }

    proptest! {
        #[test]
        fn a_version_reads_back(config in part(), rules in part()) {
            let content = Content { config, rules };
            prop_assert_eq!(Content::decode(&content.encode().unwrap()), Ok(content));
        }

        #[test]
        fn other_bytes_are_refused_or_read(changes in prop::collection::vec(any::<(u8, u8)>(), 1..4)) {
            let part = |name: &str| Part { name: name.to_owned(), text: "text\n".to_owned() };
            let mut bytes = Content { config: part("a.toml"), rules: part("b") }.encode().unwrap();
            for (at, bits) in changes {
                let at = usize::from(at) % bytes.len();
                bytes[at] ^= bits;
            }
            if let Ok(content) = Content::decode(&bytes) {
                prop_assert_eq!(content.encode().map(|bytes| bytes.len()).is_ok(), true);
            }
        }
    }

    #[test]
    fn a_version_that_is_too_long_or_has_a_strange_name_is_refused() {
        let part = |name: &str, bytes: usize| Part { name: name.to_owned(), text: "x".repeat(bytes) };
        let long = Content { config: Part::default(), rules: part("r", CONTENT_MAX) };
        let Err(ContentError::TooLong(bytes)) = long.encode() else { panic!("not too long") };
        assert!(bytes > CONTENT_MAX);
        let text = ContentError::TooLong(bytes).to_string();
        assert!(
            text.contains("at most 960 KiB (983040 bytes)") && text.contains("fleet table NAME load"),
            "{text}"
        );
        let strange = Content { config: Part::default(), rules: part("r\nconfig 0 ", 1) };
        assert_eq!(strange.encode(), Err(ContentError::Name));
        assert_eq!(Content::decode(b"towpath-group 2\n"), Err(ContentError::Version));
        assert_eq!(
            Content::decode(b"towpath-group 1\nconfig 0 \nrules 9 r\n\nadd"),
            Err(ContentError::Malformed)
        );
        let strange = b"towpath-group 1\nconfig 0 \nrules 3 r\r\n\nadd";
        assert_eq!(Content::decode(strange), Err(ContentError::Malformed));
        let long = format!("towpath-group 1\nconfig 0 {}\nrules 3 r\n\nadd", "x".repeat(NAME_MAX + 1));
        assert_eq!(Content::decode(long.as_bytes()), Err(ContentError::Malformed));
    }
}
