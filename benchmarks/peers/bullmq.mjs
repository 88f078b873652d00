// BullMQ on Node: the steps that benchmarks/peers/kit.py describes; jobs are locked while they run.
import { spawn } from 'node:child_process';
import { appendFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const { Queue, Worker } = createRequire(`${process.cwd()}/`)('bullmq');
const place = new URL(process.env.BENCH_URL);
const connection = { host: place.hostname, port: Number(place.port), maxRetriesPerRequest: null };
const BODY = { sent: 0, text: 'x'.repeat(80) };
const OPTIONS = { removeOnComplete: true };
const BULK = 500;
const [step, ...numbers] = process.argv.slice(2);
const [first, second, third] = numbers.map(Number);

const now = () => (performance.timeOrigin + performance.now()) / 1000;
const forever = () => new Promise(() => setInterval(() => {}, 1e6));

async function timed(publish) {
  const queue = new Queue('bench', { connection });
  await queue.waitUntilReady();
  const began = now();
  await publish(queue);
  const seconds = now() - began;
  await queue.close();
  return seconds;
}

const steps = {
  one: () =>
    timed(async (queue) => {
      for (let i = 0; i < first; i++) await queue.add('handle', BODY, OPTIONS);
    }),
  bulk: () =>
    timed(async (queue) => {
      const batch = Array.from({ length: BULK }, () => ({ name: 'handle', data: BODY, opts: OPTIONS }));
      for (let i = 0; i < first; i += BULK) await queue.addBulk(batch);
    }),
  late: () =>
    timed(async (queue) => {
      const start = now() + third;
      for (let i = 0; i < first * second; i++) {
        const due = start + i / first;
        const delay = Math.max(0, Math.round((due - now()) * 1000));
        await queue.add('note', { ...BODY, sent: due }, { ...OPTIONS, delay });
      }
    }),
  slow: () =>
    timed(async (queue) => {
      for (let i = 0; i < first; i++) {
        await new Promise((done) => setTimeout(done, 30));
        await queue.add('note', { ...BODY, sent: now() }, OPTIONS);
      }
    }),
  work: () => {
    for (let i = 0; i < first; i++) spawn(process.execPath, [process.argv[1], 'serve'], { stdio: 'inherit' });
    return forever();
  },
  serve: () => {
    const handle = async (job) => {
      if (job.name === 'note') appendFileSync(process.env.BENCH_LOG, `${(now() - job.data.sent).toFixed(6)}\n`);
    };
    new Worker('bench', handle, { connection, concurrency: parseInt(process.env.BENCH_SLOTS, 10) });
    return forever();
  },
};

console.log(await steps[step]());
process.exit(0);
