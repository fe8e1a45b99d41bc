//! A collector of IPFIX messages for tests, written from RFC 7011 and independent of the encoder.

use std::collections::{BTreeMap, HashMap};

/// The fields of a data record, by enterprise number and element.
pub(super) type Data = BTreeMap<(u32, u16), Vec<u8>>;

/// Fields of a template: enterprise number, element, length.
type Template = Vec<(u32, u16, u16)>;

/// The templates of an exporter, by domain and id.
#[derive(Debug, Default)]
pub(super) struct Collector {
    templates: HashMap<(u32, u16), Template>,
}

/// A message.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) sequence: u32,
    pub(super) domain: u32,
    pub(super) records: Vec<Data>,
}

struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or("too short")?;
        self.0 = rest;
        Ok(taken)
    }

    fn u16(&mut self) -> Result<u16, String> {
        Ok(u16::from_be_bytes(self.take(2)?.try_into().unwrap()))
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_be_bytes(self.take(4)?.try_into().unwrap()))
    }
}

impl Collector {
    pub(super) fn read(&mut self, message: &[u8]) -> Result<Read, String> {
        let mut bytes = Bytes(message);
        let (version, length) = (bytes.u16()?, bytes.u16()?);
        if version != 10 || usize::from(length) != message.len() {
            return Err(format!("version {version}, length {length} of {}", message.len()));
        }
        let (_time, sequence, domain) = (bytes.u32()?, bytes.u32()?, bytes.u32()?);
        let mut records = Vec::new();
        while !bytes.0.is_empty() {
            let (set, length) = (bytes.u16()?, usize::from(bytes.u16()?));
            let mut content = Bytes(bytes.take(length.checked_sub(4).ok_or("a set without header")?)?);
            while !content.0.is_empty() {
                match set {
                    2 | 3 => self.template(domain, set == 3, &mut content)?,
                    256.. => records.push(self.data(domain, set, &mut content)?),
                    _ => return Err(format!("set {set}")),
                }
            }
        }
        Ok(Read { sequence, domain, records })
    }

    fn template(&mut self, domain: u32, options: bool, bytes: &mut Bytes<'_>) -> Result<(), String> {
        let (id, count) = (bytes.u16()?, bytes.u16()?);
        if id < 256 || count == 0 {
            return Err(format!("template {id} with {count} fields"));
        }
        if options {
            let scope = bytes.u16()?;
            if scope == 0 || scope > count {
                return Err(format!("{scope} of {count} fields are scope"));
            }
        }
        let mut fields = Vec::new();
        for _ in 0..count {
            let (element, length) = (bytes.u16()?, bytes.u16()?);
            let enterprise = if element & 0x8000 == 0 { 0 } else { bytes.u32()? };
            fields.push((enterprise, element & 0x7fff, length));
        }
        self.templates.insert((domain, id), fields);
        Ok(())
    }

    fn data(&self, domain: u32, set: u16, bytes: &mut Bytes<'_>) -> Result<Data, String> {
        let fields = self.templates.get(&(domain, set)).ok_or("no template")?;
        let mut data = Data::new();
        for (enterprise, element, length) in fields {
            let length = match length {
                65_535 => match bytes.take(1)?[0] {
                    255 => usize::from(bytes.u16()?),
                    short => usize::from(short),
                },
                fixed => usize::from(*fixed),
            };
            data.insert((*enterprise, *element), bytes.take(length)?.to_vec());
        }
        Ok(data)
    }
}
