//! `[ipfix]`: flow records for a collector.

use std::time::Duration;

use super::reader::Table;

/// The export of flow records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipfix {
    /// `HOST:PORT` of the collector.
    pub collector: String,
    /// The observation domain.
    pub domain: u32,
    /// Interval of the records of a flow that continues.
    pub active_timeout: Duration,
    /// Interval at which templates are sent.
    pub template_refresh: Duration,
    /// Maximum length of a packet with a message.
    pub mtu: u16,
    /// A record at the start of each flow.
    pub starts: bool,
}

pub(super) fn take(top: &Table<'_, '_>) -> Option<Ipfix> {
    let table = top.table("ipfix")?;
    let hint = "name the collector: collector = \"127.0.0.1:4739\"";
    table.need("collector", hint);
    let collector = table.text("collector");
    if let Some(collector) = &collector {
        let port = collector.value.rsplit_once(':').filter(|(host, _)| !host.is_empty());
        if port.and_then(|(_, port)| port.parse::<u16>().ok()).is_none_or(|port| port == 0) {
            table.wrong(&collector.span, "no address `HOST:PORT`", hint);
        }
    }
    let ipfix = Ipfix {
        collector: collector.map_or_else(String::new, |text| text.value.to_owned()),
        domain: table.number("domain").unwrap_or(1) as u32,
        active_timeout: table.seconds("active-timeout").unwrap_or(Duration::from_secs(60)),
        template_refresh: table.seconds("template-refresh").unwrap_or(Duration::from_secs(600)),
        mtu: table.number("mtu").unwrap_or(1500) as u16,
        starts: table.flag("starts").unwrap_or(false),
    };
    table.finish();
    Some(ipfix)
}
