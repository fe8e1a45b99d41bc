//! Exit codes of the command line. They are stable: scripts may rely on them.

macro_rules! codes {
    ($($name:ident = $code:literal $help:literal)+) => {
        $(#[doc = $help] pub const $name: u8 = $code;)+

        /// All exit codes with their meanings.
        pub const TABLE: &[(u8, &str)] = &[$(($code, $help)),+];
    };
}

codes! {
    OK = 0 "success"
    FAILED = 1 "the run failed, or the engine refused the request"
    NO_CAPTURE = 2 "a capture cannot be read"
    BAD_RULES = 3 "errors in the rules"
    INSPECTOR = 4 "an inspector or worker did not start or attach"
    NO_ENGINE = 5 "no engine at the control socket, no access to it, or a socket of `[control]` or `[metrics]` cannot be created"
    BAD_CONFIG = 6 "errors in the configuration"
    NO_PORT = 7 "a port or a listening address of a mux is not available"
    NOT_PASSED = 8 "`explain --exit-code`: the packet does not pass"
    LACKS = 9 "`doctor`: the machine lacks something that a port needs"
    USAGE = 64 "wrong usage"
}

/// The table in one paragraph, for `--help`.
pub fn help() -> String {
    let codes: Vec<String> = TABLE.iter().map(|(code, meaning)| format!("{code} {meaning}")).collect();
    format!("Exit codes: {}; 128 + N if signal N ended a replay.", codes.join("; "))
}
