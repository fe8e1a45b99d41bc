//! The two text formats of metrics, and the choice between them.

/// A text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus text format 0.0.4.
    Text,
}

impl Format {
    /// The media type.
    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// The format that the values of `Accept` prefer. OpenMetrics only if they name it, as Prometheus's client libraries choose.
    pub(super) fn accepted<'a>(values: impl Iterator<Item = &'a [u8]>) -> Self {
        let (mut open, mut text) = (0.0_f32, 0.0_f32);
        for value in values.filter_map(|value| std::str::from_utf8(value).ok()) {
            for range in value.split(',') {
                let mut parts = range.split(';').map(str::trim);
                let media = parts.next().unwrap_or_default().to_ascii_lowercase();
                let (mut quality, mut version) = (1.0, "");
                for (name, value) in parts.filter_map(|part| part.split_once('=')) {
                    match &*name.trim().to_ascii_lowercase() {
                        "q" => quality = value.trim().parse().unwrap_or(0.0),
                        "version" => version = value.trim().trim_matches('"'),
                        _ => {}
                    }
                }
                match (&*media, version) {
                    ("application/openmetrics-text", "" | "1.0.0") => open = open.max(quality),
                    ("text/plain", "" | "0.0.4") | ("text/*" | "*/*", _) => text = text.max(quality),
                    _ => {}
                }
            }
        }
        if open > 0.0 && open >= text { Self::OpenMetrics } else { Self::Text }
    }
}

/// OpenMetrics text in format 0.0.4: the family of a counter has the name of its samples, and the lines UNIT and EOF are left out.
pub(super) fn prometheus_text(openmetrics: &str) -> String {
    let mut text = String::with_capacity(openmetrics.len());
    let mut lines = openmetrics.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(rest) = line.strip_prefix("# ") else {
            text.extend([line, "\n"]);
            continue;
        };
        let mut words = rest.splitn(3, ' ');
        let (Some("HELP"), Some(family), Some(help)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        // The encoder writes HELP and then TYPE.
        let kind = lines
            .peek()
            .and_then(|next| next.strip_prefix("# TYPE ")?.split_once(' '))
            .map_or("untyped", |(_, kind)| kind);
        let (suffix, kind) = match kind {
            "counter" => ("_total", "counter"),
            "info" => ("_info", "gauge"),
            other => ("", other),
        };
        text += &format!("# HELP {family}{suffix} {help}\n# TYPE {family}{suffix} {kind}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_negotiated() {
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                          application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,\
                          text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        let rows = [
            (prometheus, Format::OpenMetrics),
            ("application/openmetrics-text", Format::OpenMetrics),
            ("Application/OpenMetrics-Text; version=\"1.0.0\"", Format::OpenMetrics),
            ("application/openmetrics-text;version=0.0.1", Format::Text),
            ("application/openmetrics-text;q=0.2, text/plain;q=0.5", Format::Text),
            ("application/openmetrics-text;q=0", Format::Text),
            ("application/openmetrics-text;q=x", Format::Text),
            ("*/*", Format::Text),
            ("text/plain;version=0.0.4", Format::Text),
            ("", Format::Text),
        ];
        for (accept, format) in rows {
            assert_eq!(Format::accepted([accept.as_bytes()].into_iter()), format, "{accept}");
        }
        assert_eq!(Format::accepted(std::iter::empty()), Format::Text);
        let two: [&[u8]; 2] = [b"text/plain;q=0.1", b"application/openmetrics-text;q=0.2"];
        assert_eq!(Format::accepted(two.into_iter()), Format::OpenMetrics);
    }

    #[test]
    fn prometheus_text_has_the_names_of_samples() {
        let open = "# HELP a_bytes Bytes\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total{} 1\n\
                    # HELP b B\n# TYPE b gauge\nb{x=\"# HELP\"} 2\n# HELP c C\n# TYPE c info\nc_info{version=\"1\"} 1\n# EOF\n";
        let text = "# HELP a_bytes_total Bytes\n# TYPE a_bytes_total counter\na_bytes_total{} 1\n\
                    # HELP b B\n# TYPE b gauge\nb{x=\"# HELP\"} 2\n# HELP c_info C\n# TYPE c_info gauge\nc_info{version=\"1\"} 1\n";
        assert_eq!(prometheus_text(open), text);
    }
}
