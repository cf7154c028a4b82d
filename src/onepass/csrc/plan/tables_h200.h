// tables_h200.h: the tables that come with onepass. scripts/tables_to_cpp.py writes the text between the marks, from a
// file that `onepass tune --out` wrote.
#pragma once

#include "tables.h"

namespace onepass {

inline const Tables& built_in() {
  [[maybe_unused]] constexpr int kWarp = int(Tier::warp), kStaged = int(Tier::staged), kBlock = int(Tier::block),
                                 kCluster = int(Tier::cluster), kGrid = int(Tier::grid), kTwopass = int(Tier::twopass),
                                 kColumns = int(Tier::columns), kColumnsGrid = int(Tier::columns_grid);
  // clang-format off
  // begin: NVIDIA H200, 2026-11-22
  static const Tables tables = {
      "built in, measured on NVIDIA H200, 2026-11-22",
      {  // write_f32
          {5, kWarp, 1, 0, 1, 0}, {27, kWarp, 2, 0, 1, 0}, {55, kWarp, 4, 0, 1, 0}, {119, kWarp, 8, 0, 1, 0},
          {506, kWarp, 16, 0, 1, 0}, {2048, kBlock, 0, 28, 1, 0}, {2239, kBlock, 0, 20, 1, 0},
          {3584, kBlock, 0, 16, 1, 0}, {5120, kBlock, 0, 20, 1, 0}, {6079, kBlock, 0, 28, 1, 0},
          {6400, kBlock, 0, 20, 1, 0}, {7680, kBlock, 0, 24, 1, 0}, {8960, kBlock, 0, 28, 1, 0},
          {13478, kCluster, 0, 28, 2, 0}, {32382, kCluster, 0, 32, 4, 0}, {76797, kCluster, 128, 28, 8, 8},
          {160714, kCluster, 128, 24, 16, 12}, {199749, kCluster, 192, 24, 16, 12}, {235517, kCluster, 0, 28, 16, 16},
          {280433, kCluster, 256, 24, 16, 12}, {428952, kCluster, 320, 28, 16, 16}, {466941, kCluster, 0, 28, 16, 12},
          {552957, kCluster, 0, 24, 16, 12}, {kAnyLength, kGrid, 480, 16, 1, 0},
      },
      {  // write_f16
          {11, kWarp, 1, 0, 1, 0}, {19, kWarp, 2, 0, 1, 0}, {27, kWarp, 4, 0, 1, 0}, {35, kWarp, 2, 0, 1, 0},
          {43, kWarp, 4, 0, 1, 0}, {55, kWarp, 2, 0, 1, 0}, {103, kWarp, 4, 0, 1, 0}, {239, kWarp, 8, 0, 1, 0},
          {478, kWarp, 16, 0, 1, 0}, {1600, kWarp, 32, 0, 1, 0}, {3647, kBlock, 0, 40, 1, 0},
          {4096, kBlock, 0, 32, 1, 0}, {5055, kBlock, 0, 40, 1, 0}, {5120, kBlock, 0, 32, 1, 0},
          {7680, kBlock, 0, 40, 1, 0}, {8192, kBlock, 0, 32, 1, 0}, {9279, kBlock, 0, 40, 1, 0},
          {9919, kCluster, 0, 40, 2, 0}, {12095, kCluster, 0, 64, 2, 0}, {12793, kBlock, 0, 40, 1, 0},
          {16385, kCluster, 0, 48, 2, 0}, {17379, kBlock, 320, 40, 1, 4}, {21497, kCluster, 0, 48, 2, 0},
          {32000, kCluster, 0, 56, 4, 0}, {32382, kCluster, 0, 32, 4, 4}, {42426, kCluster, 0, 56, 4, 0},
          {47555, kCluster, 0, 48, 8, 0}, {50280, kCluster, 192, 56, 4, 4}, {129656, kCluster, 0, 64, 8, 0},
          {225000, kCluster, 0, 64, 16, 0}, {368633, kCluster, 0, 56, 16, 8}, {1048576, kCluster, 256, 56, 16, 12},
          {1100000, kCluster, 480, 48, 16, 12}, {kAnyLength, kGrid, 480, 32, 1, 0},
      },
      {  // reduce_f32
          {27, kWarp, 1, 0, 1, 0}, {35, kWarp, 4, 0, 1, 0}, {56, kWarp, 2, 0, 1, 0}, {160, kWarp, 4, 0, 1, 0},
          {320, kWarp, 8, 0, 1, 0}, {640, kWarp, 16, 0, 1, 0}, {1024, kBlock, 0, 32, 1, 0}, {1280, kWarp, 32, 0, 1, 0},
          {8192, kBlock, 0, 32, 1, 0}, {8257, kTwopass, 128, 16, 1, 0}, {9279, kTwopass, 128, 24, 1, 0},
          {10240, kBlock, 0, 32, 1, 0}, {10815, kTwopass, 64, 24, 1, 0}, {11327, kTwopass, 64, 16, 1, 0},
          {12351, kTwopass, 128, 24, 1, 0}, {15325, kTwopass, 64, 16, 1, 0}, {19200, kTwopass, 128, 16, 1, 0},
          {20477, kBlock, 0, 32, 1, 8}, {25922, kTwopass, 256, 24, 1, 0}, {32768, kBlock, 0, 32, 1, 8},
          {38400, kTwopass, 256, 24, 1, 0}, {61303, kTwopass, 128, 16, 1, 0}, {76896, kTwopass, 256, 16, 1, 0},
          {94868, kTwopass, 512, 16, 1, 0}, {104880, kTwopass, 256, 24, 1, 0}, {141118, kTwopass, 256, 16, 1, 0},
          {179722, kTwopass, 512, 16, 1, 0}, {199749, kTwopass, 256, 16, 1, 0}, {219772, kTwopass, 512, 16, 1, 0},
          {242652, kTwopass, 512, 8, 1, 0}, {324037, kTwopass, 256, 16, 1, 0}, {428952, kTwopass, 512, 16, 1, 0},
          {1048576, kTwopass, 1024, 16, 1, 0}, {kAnyLength, kGrid, 480, 16, 1, 0},
      },
      {  // reduce_f16
          {35, kWarp, 1, 0, 1, 0}, {55, kWarp, 2, 0, 1, 0}, {256, kWarp, 4, 0, 1, 0}, {473, kWarp, 8, 0, 1, 0},
          {1024, kWarp, 16, 0, 1, 0}, {2048, kWarp, 32, 0, 1, 0}, {8192, kBlock, 0, 64, 1, 0},
          {8257, kTwopass, 128, 16, 1, 0}, {16384, kBlock, 0, 64, 1, 0}, {19200, kBlock, 192, 56, 1, 8},
          {32000, kCluster, 128, 64, 2, 8}, {38400, kTwopass, 128, 32, 1, 0}, {47555, kCluster, 256, 64, 2, 4},
          {69167, kCluster, 256, 56, 2, 12}, {76896, kTwopass, 256, 48, 1, 0}, {85381, kCluster, 0, 64, 8, 4},
          {102393, kCluster, 320, 64, 2, 12}, {160714, kCluster, 128, 64, 8, 12}, {196601, kCluster, 0, 64, 8, 8},
          {242652, kCluster, 256, 56, 8, 8}, {262144, kCluster, 0, 64, 8, 8}, {374165, kTwopass, 1024, 16, 1, 0},
          {409593, kCluster, 0, 64, 8, 12}, {1048576, kTwopass, 1024, 16, 1, 0}, {1100000, kCluster, 480, 48, 16, 12},
          {kAnyLength, kGrid, 480, 32, 1, 0},
      },
      {  // unaligned_f32
          {20, kStaged, 1, 0, 1, 0}, {55, kStaged, 2, 0, 1, 0}, {80, kStaged, 4, 0, 1, 0}, {155, kStaged, 8, 0, 1, 0},
          {250, kStaged, 16, 0, 1, 0}, {kAnyLength, kUseWriteTable, 0, 0, 1, 0},
      },
      {  // unaligned_f16
          {30, kStaged, 1, 0, 1, 0}, {40, kStaged, 2, 0, 1, 0}, {70, kStaged, 4, 0, 1, 0}, {125, kStaged, 8, 0, 1, 0},
          {440, kStaged, 16, 0, 1, 0}, {1369, kStaged, 32, 0, 1, 0}, {kAnyLength, kUseWriteTable, 0, 0, 1, 0},
      },
      {  // few_rows_f32
          {255, kUseWriteTable, 0, 0, 1, 0}, {350, kWarp, 16, 0, 1, 0}, {946, kWarp, 32, 0, 1, 0},
          {7615, kBlock, 0, 32, 1, 0}, {7680, kBlock, 0, 24, 1, 0}, {8127, kBlock, 0, 32, 1, 0},
          {11071, kCluster, 0, 28, 2, 0}, {16384, kCluster, 0, 32, 4, 0}, {kAnyLength, kUseWriteTable, 0, 0, 1, 0},
      },
      {  // few_rows_f16
          {255, kUseWriteTable, 0, 0, 1, 0}, {447, kWarp, 16, 0, 1, 0}, {575, kWarp, 32, 0, 1, 0},
          {701, kWarp, 16, 0, 1, 0}, {1470, kWarp, 32, 0, 1, 0}, {2560, kBlock, 0, 40, 1, 0},
          {5695, kBlock, 0, 64, 1, 0}, {7615, kBlock, 0, 56, 1, 0}, {9000, kBlock, 0, 64, 1, 0},
          {16384, kCluster, 0, 56, 2, 0}, {kAnyLength, kUseWriteTable, 0, 0, 1, 0},
      },
      {  // columns_f32
          {24, kColumns, 64, 24, 64, 0}, {32, kColumns, 128, 8, 32, 0}, {64, kColumns, 128, 8, 16, 0},
          {128, kColumns, 128, 16, 16, 0}, {224, kColumns, 128, 14, 8, 0}, {1024, kColumns, 128, 12, 16, 4},
          {4096, kColumns, 128, 20, 16, 12}, {8192, kColumns, 128, 20, 8, 12}, {16384, kColumns, 256, 20, 8, 12},
          {kAnyLength, kColumnsGrid, 0, 0, 8, 0},
      },
      {  // columns_f16
          {24, kColumns, 128, 24, 128, 0}, {32, kColumns, 64, 8, 16, 0}, {64, kColumns, 128, 8, 16, 0},
          {160, kColumns, 128, 16, 8, 0}, {208, kColumns, 128, 18, 16, 8}, {256, kColumns, 128, 10, 16, 8},
          {384, kColumns, 128, 8, 16, 4}, {512, kColumns, 128, 12, 16, 4}, {1024, kColumns, 128, 8, 8, 8},
          {1536, kColumns, 128, 8, 8, 4}, {2048, kColumns, 128, 12, 8, 4}, {4096, kColumns, 128, 16, 8, 16},
          {8192, kColumns, 128, 24, 8, 8}, {16384, kColumns, 256, 16, 8, 16}, {kAnyLength, kColumnsGrid, 0, 0, 8, 0},
      },
      {  // columns_backward_f32
          {24, kColumns, 128, 6, 32, 0}, {32, kColumns, 64, 8, 16, 0}, {64, kColumns, 128, 8, 16, 0},
          {256, kColumns, 128, 8, 16, 0}, {512, kColumns, 256, 4, 16, 0}, {2048, kColumns, 128, 16, 16, 0},
          {4096, kColumns, 128, 16, 8, 0}, {8192, kColumns, 256, 8, 8, 8}, {16384, kColumns, 512, 8, 8, 8},
          {kAnyLength, kColumnsGrid, 0, 0, 8, 0},
      },
      {  // columns_backward_f16
          {24, kColumns, 128, 6, 32, 0}, {32, kColumns, 64, 8, 16, 0}, {64, kColumns, 128, 8, 16, 0},
          {240, kColumns, 128, 8, 8, 0}, {256, kColumns, 256, 8, 8, 1}, {512, kColumns, 128, 8, 8, 0},
          {1024, kColumns, 128, 16, 16, 0}, {4096, kColumns, 128, 16, 8, 0}, {8192, kColumns, 256, 8, 8, 8},
          {16384, kColumns, 512, 8, 8, 8}, {kAnyLength, kColumnsGrid, 0, 0, 8, 0},
      },
  };
  // end
  // clang-format on
  return tables;
}

// For gradients of rows, which keep two operands. items_per_thread counts elements of each operand. Measured on NVIDIA
// H200, 2026-11-22 (benchmarks/results/sweep-backward-h200-2026-11-22.json).
inline const std::vector<Entry>& built_in_rows_backward(bool half) {
  constexpr int kWarp = int(Tier::warp), kBlock = int(Tier::block), kCluster = int(Tier::cluster),
                kGrid = int(Tier::grid);
  // clang-format off
  static const std::vector<Entry> of32 = {
      {23, kWarp, 2, 0, 1, 0}, {47, kWarp, 4, 0, 1, 0}, {56, kWarp, 8, 0, 1, 0}, {114, kWarp, 16, 0, 1, 0},
      {320, kWarp, 32, 0, 1, 0}, {448, kBlock, 0, 8, 1, 0}, {700, kBlock, 0, 12, 1, 0}, {1800, kBlock, 0, 8, 1, 0},
      {2500, kBlock, 0, 16, 1, 0}, {3500, kBlock, 0, 12, 1, 0}, {7000, kBlock, 0, 16, 1, 0},
      {10000, kCluster, 0, 16, 4, 0}, {14000, kCluster, 0, 20, 4, 0}, {40000, kCluster, 0, 20, 8, 0},
      {147000, kCluster, 0, 20, 16, 0}, {196608, kCluster, 0, 24, 16, 0}, {kAnyLength, kGrid, 0, 0, 1, 0},
  };
  static const std::vector<Entry> of16 = {
      {11, kWarp, 1, 0, 1, 0}, {23, kWarp, 2, 0, 1, 0}, {47, kWarp, 4, 0, 1, 0}, {140, kWarp, 8, 0, 1, 0},
      {330, kWarp, 16, 0, 1, 0}, {900, kWarp, 32, 0, 1, 0}, {1024, kBlock, 0, 16, 1, 0}, {1250, kBlock, 0, 24, 1, 0},
      {7000, kBlock, 0, 16, 1, 0}, {10000, kCluster, 0, 24, 2, 0}, {22500, kCluster, 0, 24, 4, 0},
      {40000, kCluster, 0, 32, 8, 0}, {110000, kCluster, 0, 40, 8, 0}, {327680, kCluster, 0, 40, 16, 0},
      {kAnyLength, kGrid, 0, 0, 1, 0},
  };
  // clang-format on
  return half ? of16 : of32;
}

// For gradients of rows that lie one after another and are not whole vectors. Measured on NVIDIA H200, 2026-11-26
// (benchmarks/results/sweep-rows-h200-2026-11-26.txt).
inline const std::vector<Entry>& built_in_unaligned_rows_backward(bool half) {
  constexpr int kStaged = int(Tier::staged);
  static const std::vector<Entry> of32 = {{16, kStaged, 1, 0, 1, 0},
                                          {40, kStaged, 2, 0, 1, 0},
                                          {56, kStaged, 8, 0, 1, 0},
                                          {kAnyLength, kUseWriteTable, 0, 0, 1, 0}};
  static const std::vector<Entry> of16 = {{16, kStaged, 1, 0, 1, 0}, {40, kStaged, 4, 0, 1, 0},
                                          {56, kStaged, 8, 0, 1, 0}, {66, kStaged, 4, 0, 1, 0},
                                          {80, kStaged, 8, 0, 1, 0}, {kAnyLength, kUseWriteTable, 0, 0, 1, 0}};
  return half ? of16 : of32;
}

}  // namespace onepass
