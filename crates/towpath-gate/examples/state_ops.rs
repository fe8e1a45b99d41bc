//! Runs random operations on the state table and on its model, and compares them: `state_ops [OPERATIONS [SEED]]`.

use towpath_gate::state::testing::ops::{OP_BYTES, Op, World};

/// Everything is compared after this many operations; the result of each operation, always.
const COMPARE: u64 = 256;
/// Number of operations per world; the table grows during its life.
const LIFE: u64 = 100_000;
const SMALL: u64 = 75_000;

/// More states than fit into the first chunk of slots (4,096) and into the first index.
const MANY: u16 = 4_500;

fn main() {
    let mut numbers = std::env::args().skip(1).map(|word| word.parse::<u64>().expect("a number"));
    let (operations, seed) = (numbers.next().unwrap_or(100_000_000), numbers.next().unwrap_or(1));
    let (mut world, mut random) = (World::new(COMPARE), seed | 1);
    for n in 0..operations {
        if n % LIFE == 0 {
            world = World::new(COMPARE);
        }
        if n % LIFE == SMALL {
            world.grow(MANY, n / LIFE % 2 == 1);
        }
        let bytes: [u8; OP_BYTES] = std::array::from_fn(|_| {
            // Knuth's MMIX generator (The Art of Computer Programming, volume 2, 3.3.4).
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 56) as u8
        });
        world.step(&Op::new(&bytes));
    }
    println!("{operations} operations with seed {seed}: the table did what the model says");
}
