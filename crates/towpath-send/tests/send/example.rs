//! Runs the example of the guide "Send large messages without copying".

use std::io::Read;
use std::net::TcpListener;
use std::process::Command;

#[test]
fn the_example_sends_a_file_intact() {
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/sender");
    assert!(program.exists(), "{} is built by `cargo build --examples`", program.display());
    let file = tempfile("towpath-send-example");
    let bytes: Vec<u8> = (0..5_000_000_u32).map(|at| (at % 251) as u8).collect();
    std::fs::write(&file, &bytes).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let reader = std::thread::spawn(move || {
        let mut got = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut got).unwrap();
        got
    });
    let output = Command::new(program).arg(address).arg(&file).output().unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(reader.join().unwrap() == bytes);
    let said = String::from_utf8(output.stdout).unwrap();
    let words: Vec<&str> = said.split(' ').collect();
    let [zerocopy, copied] = [words[0], words[5]].map(|number| number.parse::<u64>().unwrap());
    assert_eq!(zerocopy + copied, 5_000_000, "{said}");
}

fn tempfile(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("{name}-{}", std::process::id()))
}
